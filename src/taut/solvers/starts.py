"""Where Newton's method begins: at the λ that was given, or where exp is neither huge nor all 0."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from taut.solvers import base
from taut.solvers.anneal import grown
from taut.solvers.base import relative
from taut.solvers.step import Search, State

_VANISHED = 1e-30  # a slope that is as good as none
_UNSOLVED = 1e-2  # of b: a residual that is far from solved
_LIFTS = 4  # at most: rows may share outputs
_HIGH = 1e3  # of b: from there on the way down is longer than the way up


def first_state(search: Search, start: Tensor) -> State:
    """Everything at the λ that was given; at a better one, where that leads nowhere."""
    # States are written to: `start` itself must not be part of one.
    task = search.task
    state = search.state(task.basis.enter(task.A, start).clone())
    lost = _lost(search, state).nonzero().squeeze(-1)
    if len(lost):
        state.write(lost, _lower(search.take(lost), state.take(lost)))
        _grow(search, state, lost)
    _lift(search, state)
    return state


def _grow(search: Search, state: State, index: Int[Tensor, "m"]) -> None:
    """A better start for the samples of `index` that are anchored, and lost even now."""
    if search.bends is None:
        return
    part = search.take(index)
    still = _lost(part, state.take(index)) & part.anchored(state.u[index], search.bends)
    index = index[still]
    if len(index):
        state.write(index, grown(search.take(index), state.take(index)))


def _lost(search: Search, state: State) -> Bool[Tensor, "n"]:
    lost = ~(state.residual.abs() <= search.rules.lost * (1 + search.size_of_b)).all(-1)
    if search.bends is None:
        return lost
    # Where no σ bends, one step leads anywhere.
    return (lost & search.bends.any()) | ~(state.relative < torch.inf)


def _lift(search: Search, state: State) -> None:
    """Begin near 0 with the u of sums whose outputs have all vanished, as those of exp at −1e9.

    Such rows tell a step nothing. Their A u is made 0 by the least λ, and then their largest u;
    where that leaves other rows worse off, they stay as they were. Not of rows whose entries
    differ: which of their outputs comes up first then depends on λ.
    """
    task = search.task
    lower, upper = task.activation.range.bounds(task.v)
    open = (lower.isinf() | upper.isinf()).expand_as(task.v)
    size, ones = task.A.abs(), torch.ones_like(task.v)
    for _ in range(_LIFTS):
        w = task.activation.slope(state.u)
        if base.on_host(w) and not bool(((w <= _VANISHED) & open).any()):
            return
        total, sizes = task.A.apply(ones), size.apply(ones)
        count = task.A.over((task.A.data != 0).to(w.dtype)).apply(ones)
        deep = size.apply(w) < _VANISHED * size.apply(open.to(w.dtype))
        deep &= state.residual.abs() > _UNSOLVED * search.size_of_b
        deep &= total.abs() >= (1 - 1e-12) * count * task.A.largest()
        index = deep.any(-1).nonzero().squeeze(-1)
        if len(index) == 0:
            return
        part, at, rows, even = search.take(index), state.take(index), deep[index], ones[index]
        A, scale = part.task.A, sizes[index] + part.size_of_b
        multipliers = at.multipliers + part.direction(even, torch.where(rows, A.apply(at.u), 0))
        u = part.task.basis.map.shifted_adjoint(part.task.v, multipliers)
        top = torch.where(rows, A.highest(u) * total[index], 0)
        lifted = part.state(multipliers + part.direction(even, top))
        before, after = (relative(x.residual, scale) for x in (at, lifted))
        high = rows & (lifted.residual.abs() > _HIGH * part.size_of_b)
        better = ((after <= before.clamp_min(1)) & ~high.any(-1)).nonzero().squeeze(-1)
        if len(better) == 0:
            return
        state.write(index[better], lifted.take(better))


def _lower(search: Search, state: State) -> State:
    """A better start where exp begins far too high, if there is one.

    Only the part of v in the null space of A matters, so the rest can be taken out; and then
    u can move down as one: v → v − Aᵀ(AAᵀ)⁻¹A(v + s·1), first with s = 0, then s = max u. Before
    that, λ = 0: a start that was given may be the culprit.
    """
    task = search.task
    v = task.v
    multipliers, shift = torch.zeros_like(state.multipliers), torch.zeros_like(v[:, :1])
    for attempt in range(3):
        if attempt > 0:
            multipliers = search.direction(torch.ones_like(v), task.A.apply(v + shift))
        trial = search.state(multipliers)
        if attempt > 0:
            shift = trial.u.amax(-1, keepdim=True)
        size, before = (x.residual.abs().amax(-1).nan_to_num(torch.inf) for x in (trial, state))
        better = (size < before).nonzero().squeeze(-1)
        state.write(better, trial.take(better))
    return state

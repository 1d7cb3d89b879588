"""Where Newton's method begins: at the λ that was given, or where exp is neither huge nor all 0."""

import torch
from jaxtyping import Bool
from torch import Tensor

from taut.solvers import base
from taut.solvers.step import Search, State

_VANISHED = 1e-30  # a slope that is as good as none
_UNSOLVED = 1e-2  # of b: a residual that is far from solved
_LIFTS = 4  # at most: rows may share outputs


def first_state(search: Search, start: Tensor) -> State:
    """Everything at the λ that was given; at a better one, where that leads nowhere."""
    # States are written to: `start` itself must not be part of one.
    task = search.task
    state = search.state(task.basis.enter(task.A, start).clone())
    lost = _lost(search, state).nonzero().squeeze(-1)
    if len(lost):
        state.write(lost, _lower(search.take(lost), state.take(lost)))
    _lift(search, state)
    return state


def _lost(search: Search, state: State) -> Bool[Tensor, "n"]:
    return ~(state.residual.abs() <= search.rules.lost * (1 + search.size_of_b)).all(-1)


def _lift(search: Search, state: State) -> None:
    """Begin near 0 with the u of rows whose outputs have all vanished, as those of exp at −1e9.

    Such rows tell a step nothing. Their A u is made 0 by the least λ, and then their largest u.
    """
    task = search.task
    lower, upper = task.activation.range.bounds(task.v)
    open = (lower.isinf() | upper.isinf()).expand_as(task.v)
    size = task.A.abs()
    for _ in range(_LIFTS):
        w = task.activation.slope(state.u)
        if base.on_host(w) and not bool(((w <= _VANISHED) & open).any()):
            return
        deep = size.apply(w) < _VANISHED * size.apply(open.to(w.dtype))
        deep &= state.residual.abs() > _UNSOLVED * search.size_of_b
        index = deep.any(-1).nonzero().squeeze(-1)
        if len(index) == 0:
            return
        part, rows = search.take(index), deep[index]
        A, ones = part.task.A, torch.ones_like(part.task.v)
        multipliers, u = state.multipliers[index], state.u[index]
        multipliers = multipliers + part.direction(ones, torch.where(rows, A.apply(u), 0))
        u = part.task.basis.map.shifted_adjoint(part.task.v, multipliers)
        top = torch.where(rows, A.highest(u) * A.apply(ones), 0)
        multipliers = multipliers + part.direction(ones, top)
        lifted = part.state(multipliers)
        lost = _lost(part, lifted).unsqueeze(-1)
        state.write(index, part.state(multipliers.masked_fill(lost, 0)) if lost.any() else lifted)


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

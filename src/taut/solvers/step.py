"""One step of Newton's method, for each sample alone: direction, length, and what it costs.

A step p is judged by the derivative of D along it, h(α) = pᵀ∇D(λ + αp), which rises from −|h(0)|:
it is too long when h has become clearly positive. Differences of D itself, as in Armijo's rule,
drown in rounding long before the residual does.
"""

from dataclasses import replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.activations.codes import is_line
from taut.backends import Rules
from taut.solvers import base
from taut.solvers.base import Task, relative
from taut.systems import (
    Factor,
    SharedFactor,
    factorise,
    factorise_unseen,
    independent,
    share,
    solve_gram,
    solve_gram_roughly,
)


@final
class State(NamedTuple):
    """Where n samples are."""

    multipliers: Float[Tensor, "n I"]  # of the basis Q = T A
    u: Float[Tensor, "n K"]
    z: Float[Tensor, "n K"]
    residual: Float[Tensor, "n I"]  # A z − b
    relative: Float[Tensor, "n"]  # its size over |b| + share·|A||z|

    def take(self, index: Tensor) -> "State":
        """The samples at `index`."""
        return State(*(x.index_select(0, index) for x in self))

    def write(self, index: Tensor, other: "State") -> None:
        """Put the samples of `other` at `index`, in place."""
        for mine, theirs in zip(self, other, strict=True):
            mine.index_copy_(0, index, theirs)


@final
class Search(NamedTuple):
    """D in the coordinates of the basis: u = v + Qᵀλ, ∇ = T(A z − b), ∇² = Q diag(w) Qᵀ."""

    task: Task
    rules: Rules
    size_of_b: Float[Tensor, "n I"]
    target: float  # the level of `relative` that is enough
    share: float  # of |A||z| that counts in the size of a residual
    cap: float  # what must be met, with all of |A||z|: the rule that CONVERGED promises
    bends: Float[Tensor, "K"] | None  # 1 where σ bends, 0 where it does not; None: everywhere

    @staticmethod
    def of(task: Task, rules: Rules, dtype: torch.dtype) -> "Search":
        """For numbers given in `dtype`."""
        if not base.on_host(task.v):  # steps with an old factor need more looks than a new one
            rules = replace(rules, chords=0)
        levels = rules.target(dtype), rules.share(dtype), rules.cap(dtype)
        return Search(task, rules, task.b.abs(), *levels, task.bends)

    def state(self, multipliers: Float[Tensor, "n I"]) -> State:
        """Everything at λ."""
        u = self.task.basis.map.shifted_adjoint(self.task.v, multipliers)
        z = self.task.activation.sigma(u)
        residual = self.task.residual(z)
        scale = self.size_of_terms(z, self.share)
        return State(multipliers, u, z, residual, relative(residual, scale))

    def size_of_terms(self, z: Float[Tensor, "n K"], share: float = 1.0) -> Float[Tensor, "n I"]:
        """|b| + share·|A||z|."""
        size = z if self.task.activation.range.positive else z.abs()
        return torch.add(self.size_of_b, self.task.A.abs().apply(size), alpha=share)

    def restrict(self, residual: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """T r."""
        return self.task.basis.restrict(residual)

    def slope_along(self, step: Float[Tensor, "n I"], state: State) -> Float[Tensor, "n"]:
        """h: the derivative of D along the step."""
        return (step * self.restrict(state.residual)).sum(-1)

    def reach(self, du: Float[Tensor, "n K"]) -> Float[Tensor, "n"]:
        """How far u moves where σ bends: elsewhere a step may be of any length."""
        return (du.abs() if self.bends is None else du.abs() * self.bends).amax(-1)

    def anchored(self, u: Tensor, bends: Tensor) -> Bool[Tensor, "n"]:
        """Where every combination of equations has outputs of which σ does not bend.

        The curvature is then never small: no step runs away.
        """
        basis, even = self.task.basis, (1 - bends).expand_as(u)
        if not basis.map.iterative:
            return independent(basis.map, even, basis.left_out)
        return (basis.map.abs().apply(even) > 0).all(-1)

    def direction(self, w: Tensor, residual: Tensor) -> Tensor:
        """−(Q diag(w) Qᵀ)⁻¹∇D: Newton's where w are the slopes."""
        basis = self.task.basis
        return -solve_gram(basis.map, w, self.restrict(residual), basis.left_out)

    def take(self, index: Tensor) -> "Search":
        """The samples at `index`."""
        return self._replace(task=self.task.take(index), size_of_b=self.size_of_b[index])


def newton_step(search: Search, state: State, closed: Bool[Tensor, "n"] | None) -> State:
    """The states after one iteration.

    Samples in `closed` stand still: with small batches that costs less than to leave them out.
    """
    w = search.task.activation.slope(state.u)
    line = w[0]  # of all samples, where σ is a line
    if closed is not None:
        w = w.masked_fill(closed.unsqueeze(-1), 1)
    step, factor, exact = _direction(search, state, w, line)
    if closed is not None:
        step.masked_fill_(closed.unsqueeze(-1), 0)
    result = search.state(state.multipliers + step)
    good = _good(search, state, step, result)
    bad = ~good if closed is None else ~(good | closed)
    rough = None if exact is None else bad & ~exact
    index, again = _listed(bad, rough)
    if len(index):
        if again is not None and len(again):
            direction = search.take(again).direction(w[again], state.residual[again])
            step.index_copy_(0, again, direction)
        part, before = search.take(index), state.take(index)
        result.write(index, _search(part, before, *_tame(part, before, step[index])))
    if factor is None or not search.rules.chords:
        return result
    # A step with the old factor gains about as much as the last one did: take such steps where
    # they are enough.
    gain = 2 * result.relative / state.relative
    close = good & (result.relative * gain**search.rules.chords <= search.target)
    close = close if closed is None else close & ~closed
    return _repeat(search, factor, result, close, search.rules.chords)


def _listed(bad: Tensor, rough: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Where samples are bad, and where rough, with one look on a device."""
    if base.on_host(bad):
        index = bad.nonzero().squeeze(-1)
        return index, None if rough is None or not len(index) else rough.nonzero().squeeze(-1)
    if rough is None:
        return base.places(bad, *base.look(bad.sum())), None
    some, few = base.look(bad.sum(), rough.sum())
    return base.places(bad, some), base.places(rough, few)


def _direction(
    search: Search, state: State, w: Tensor, line: Tensor
) -> tuple[Tensor, Factor | SharedFactor | None, Tensor | None]:
    """Newton's step; the factor, where there is one to use again; where a rough step is exact."""
    basis, factor, exact = search.task.basis, None, None
    residual = search.restrict(state.residual)
    alike = basis.left_out is None or basis.left_out.ndim == 1
    if is_line(search.task.activation) and alike and basis.map.shared and not basis.map.sparse:
        factor = share(basis.map, line, basis.left_out)
        step = factor.solve(residual)
    elif basis.rough is not None:
        accuracy = _accuracy(state, search.target)
        step, exact = solve_gram_roughly(basis.map, basis.rough, w, residual, accuracy)
    elif basis.map.iterative:
        step = solve_gram(basis.map, w, residual, basis.left_out)
    elif not base.on_host(w):
        unseen, exact = factorise_unseen(basis.map, w, basis.left_out)
        # Without a factor there is no step: NaN is bad, and then a direction is found for it.
        step = unseen.solve(residual).where(exact.unsqueeze(-1), torch.nan)
    else:
        factor = factorise(basis.map, w, basis.left_out)
        step = factor.solve(residual)
    return step.neg_(), factor, exact


def _good(search: Search, state: State, step: Tensor, result: State) -> Tensor:
    """Is the whole step plainly good? Near, and with a D that is nearly level at its end."""
    rules, basis = search.rules, search.task.basis
    reach = search.reach(result.u - state.u)
    first = search.slope_along(step, state).abs_()
    h = search.slope_along(step, result)
    good = (h.abs_() <= rules.level * first) & (reach <= rules.reach)
    if not basis.transformed:
        return good
    # T magnifies the rounding of the residual. Where h(0) is no more than that, h says nothing
    # and the size of the residual decides.
    noise = (step.abs() * basis.restricted_size(search.size_of_terms(state.z))).sum(-1)
    blind = first <= 8 * torch.finfo(step.dtype).eps * noise
    return good | (blind & (result.relative < state.relative))


def _accuracy(state: State, target: float) -> Tensor:
    # What is left after a Newton step is the square of what there was, or the target.
    level = state.relative
    return torch.maximum(0.3 * level, 0.3 * target / level).clamp_(1e-5, 1e-2)


def _repeat(
    search: Search, factor: Factor | SharedFactor, state: State, which: Tensor, times: int
) -> State:
    """More steps with the same factor, for the samples in `which` while each gains enough."""
    which = which & (state.relative > search.target)
    count = int(which.sum())
    if count == 0 or times == 0:
        return state
    if worth_leaving_out(count, state):
        index = which.nonzero().squeeze(-1)
        part = _repeat(
            search.take(index), factor.take(index), state.take(index), which[index], times
        )
        state.write(index, part)
        return state
    step = factor.solve(search.restrict(state.residual))
    if count < len(which):
        step.masked_fill_(~which.unsqueeze(-1), 0)
    after = search.state(state.multipliers - step)
    gains = which & (after.relative < search.rules.gain * state.relative)
    worse = (which & ~(after.relative < state.relative)).nonzero().squeeze(-1)
    if len(worse):
        after.write(worse, state.take(worse))
    return _repeat(search, factor, after, gains, times - 1)


def worth_leaving_out(count: int, state: State) -> bool:
    """Is it cheaper to copy `count` samples than to carry the others along?"""
    return count <= 0.7 * len(state.u) and state.u.numel() >= 2**14


def _tame(search: Search, state: State, step: Tensor) -> tuple[Tensor, Bool[Tensor, "n"]]:
    """The steps, with those that run away replaced; and which may be tried in full."""
    reach = search.reach(search.task.basis.map.adjoint(step))
    free = torch.zeros_like(reach, dtype=torch.bool)
    wild = (~(reach <= search.rules.wild * search.rules.reach)).nonzero().squeeze(-1)
    if len(wild) == 0:
        return step, free
    if search.bends is not None:
        good = search.take(wild).anchored(state.u[wild], search.bends) & reach[wild].isfinite()
        free[wild], wild = good, wild[~good]
    return step.index_copy(0, wild, _damped(search.take(wild), state.take(wild))), free


def _damped(search: Search, state: State) -> Tensor:
    """The direction where Newton's is hopeless: some combination of equations has saturated.

    Such a combination would run away and hold all others back. Slopes w + μ limit it, with μ
    so that a step against no curvature at all moves u by about `damped`.
    """
    basis = search.task.basis
    if basis.rough is not None:
        flat = basis.rough.solve(state.residual)
    else:
        flat = search.direction(torch.ones_like(state.u), state.residual)
    mu = basis.map.adjoint(flat).abs().amax(-1, keepdim=True) / search.rules.damped
    return search.direction(search.task.activation.slope(state.u) + mu, state.residual)


def _search(search: Search, state: State, step: Tensor, free: Bool[Tensor, "n"]) -> State:
    """The state at λ + αp, with α chosen for each sample from the size and sign of h(α).

    It begins with 1 where the step is `free`, and elsewhere with what moves u by `reach`.
    """
    rules = search.rules
    steepness = search.slope_along(step, state).abs()
    reach = search.reach(search.task.basis.map.adjoint(step)).masked_fill(free, 0)
    alpha = (rules.reach / reach).nan_to_num(0.0).clamp(max=1)
    growing, low = torch.ones_like(alpha, dtype=torch.bool), torch.zeros_like(alpha)
    todo = torch.arange(len(step), device=step.device)
    result = state.take(todo)
    for _ in range(rules.trials):
        part, h0, a, floor = search.take(todo), steepness[todo], alpha[todo], low[todo]
        trial = part.state(state.multipliers[todo] + a.unsqueeze(-1) * step[todo])
        result.write(todo, trial)
        h = part.slope_along(step[todo], trial)
        long = ~(h <= rules.overshoot * h0)
        short = (h < -rules.undershoot * h0) & growing[todo]
        cut = (h0 / (h0 + h)).nan_to_num(nan=rules.cut).clamp(rules.cut, 0.5)
        further = torch.where(short, rules.growth * a, a)
        alpha[todo] = torch.where(long, floor + (a - floor) * cut, further)
        low[todo] = torch.where(short, a, floor)
        growing[todo] = short & (a < rules.longest)
        todo = todo[long | short]
        if len(todo) == 0:
            break
    return result

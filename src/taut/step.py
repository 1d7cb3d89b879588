"""One step of Newton's method, for each sample alone: direction, length, and what it costs.

A step p is judged by the derivative of D along it, h(α) = pᵀ∇D(λ + αp), which rises from −|h(0)|:
it is too long when h has become clearly positive. Differences of D itself, as in Armijo's rule,
drown in rounding long before the residual does.
"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.dual import Dual
from taut.factor import (
    Factor,
    SharedFactor,
    factorise,
    share,
    solve_gram,
    solve_gram_roughly,
)
from taut.linear import DenseMap
from taut.rows import Rows
from taut.solver import relative
from taut.sparse import SparseMap

# u moves at most this far in the first trial of a line search: σ is another function there.
_REACH = 5.0
# Further steps with one factor, as long as each gains a digit: they cost a fraction of a new one.
_CHORDS = 5
# Trials in a line search; each shortens a step that is too long by half or more.
_TRIALS = 40


@final
class State(NamedTuple):
    """Where n samples are."""

    multipliers: Float[Tensor, "n I"]  # of the basis Q = T A
    u: Float[Tensor, "n K"]
    z: Float[Tensor, "n K"]
    residual: Float[Tensor, "n I"]  # A z − b
    relative: Float[Tensor, "n"]  # its size over |b| + share·|A||z|

    def rows(self, index: Tensor) -> "State":
        """The samples at `index`."""
        return State(*(x.index_select(0, index) for x in self))

    def write(self, index: Tensor, other: "State") -> None:
        """Put the samples of `other` at `index`, in place."""
        for mine, theirs in zip(self, other, strict=True):
            mine.index_copy_(0, index, theirs)


@final
class Problem(NamedTuple):
    """D in the coordinates of the basis: u = v + Qᵀλ, ∇ = T(A z − b), ∇² = Q diag(w) Qᵀ."""

    dual: Dual
    rows: Rows
    size_of_b: Float[Tensor, "n I"]
    # How much of |A||z| counts: less where the target is coarse, or a z far too large, on its way
    # down, would pass as soon as its terms happen to cancel to that accuracy.
    share: float

    def state(self, multipliers: Float[Tensor, "n I"]) -> State:
        """Everything at λ."""
        u = self.rows.basis.shifted_adjoint(self.dual.v, multipliers)
        z = self.dual.activation.sigma(u)
        residual = self.dual.residual(z)
        scale = self.size_of_terms(z, self.share)
        return State(multipliers, u, z, residual, relative(residual, scale))

    def size_of_terms(self, z: Float[Tensor, "n K"], share: float = 1.0) -> Float[Tensor, "n I"]:
        """|b| + share·|A||z|."""
        size = z if self.dual.activation.range.positive else z.abs()
        return torch.add(self.size_of_b, self.dual.A.abs().apply(size), alpha=share)

    def slopes(self, u: Float[Tensor, "n K"]) -> Float[Tensor, "n K"]:
        """σ'(u)."""
        return self.dual.activation.slope(u)

    def direction(self, w: Tensor, residual: Tensor) -> Tensor:
        """−(Q diag(w) Qᵀ)⁻¹∇D: Newton's where w are the slopes."""
        return -solve_gram(self.rows.basis, w, self.rows.restrict(residual), self.rows.left_out)

    @property
    def iterative(self) -> bool:
        """Is the Hessian too large to be formed?"""
        return isinstance(self.rows.basis, SparseMap) and self.rows.basis.iterative

    def take(self, index: Tensor) -> "Problem":
        """The samples at `index`."""
        dual, rows = self.dual.rows(index), self.rows.rows(index)
        return Problem(dual, rows, self.size_of_b[index], self.share)


def newton_step(
    problem: Problem, state: State, target: float, closed: Bool[Tensor, "n"] | None
) -> State:
    """The states after one iteration; `target` is the level of `relative` that is enough.

    Samples in `closed` stand still: with small batches that costs less than to leave them out.
    """
    w = problem.slopes(state.u)
    slope = w[0]  # of all samples, where σ is a line
    if closed is not None:
        w = w.masked_fill(closed.unsqueeze(-1), 1)
    factor, exact, rough = None, None, problem.rows.rough
    if problem.dual.activation.straight and isinstance(problem.rows.basis, DenseMap):
        factor = share(problem.rows.basis, slope, problem.rows.left_out)
        step = factor.solve(problem.rows.restrict(state.residual))
    elif rough is not None:
        accuracy = _accuracy(state, target)
        step, exact = solve_gram_roughly(problem.rows, rough, w, state.residual, accuracy)
    elif problem.iterative:
        step = solve_gram(
            problem.rows.basis, w, problem.rows.restrict(state.residual), problem.rows.left_out
        )
    else:
        factor = factorise(problem.rows.basis, w, problem.rows.left_out)
        step = factor.solve(problem.rows.restrict(state.residual))
    step.neg_()
    if closed is not None:
        step.masked_fill_(closed.unsqueeze(-1), 0)
    result = problem.state(state.multipliers + step)
    good = _good(problem, state, step, result)
    bad = ~good if closed is None else ~(good | closed)
    index = bad.nonzero().squeeze(-1)
    if len(index):
        if exact is not None:
            again = (bad & ~exact).nonzero().squeeze(-1)
            direction = problem.take(again).direction(w[again], state.residual[again])
            step.index_copy_(0, again, direction)
        part, before = problem.take(index), state.rows(index)
        result.write(index, _search(part, before, _tame(part, before, step[index])))
    if factor is None:
        return result
    # A step with the old factor gains about as much as the last one did: take such steps where
    # they are enough.
    gain = 2 * result.relative / state.relative
    close = good & (result.relative * gain**_CHORDS <= target)
    return _repeat(problem, factor, result, close if closed is None else close & ~closed, target)


def _good(problem: Problem, state: State, step: Tensor, result: State) -> Tensor:
    """Is the whole step plainly good? Near, and with a D that is nearly level at its end."""
    reach = (result.u - state.u).abs_().amax(-1)
    first = (step * problem.rows.restrict(state.residual)).sum(-1).abs_()
    h = (step * problem.rows.restrict(result.residual)).sum(-1)
    good = (h.abs_() <= 0.4 * first) & (reach <= _REACH)
    if problem.rows.transform is None:
        return good
    # T magnifies the rounding of the residual. Where h(0) is no more than that, h says nothing
    # and the size of the residual decides.
    noise = (step.abs() * problem.rows.restricted_size(problem.size_of_terms(state.z))).sum(-1)
    blind = first <= 8 * torch.finfo(step.dtype).eps * noise
    return good | (blind & (result.relative < state.relative))


def _accuracy(state: State, target: float) -> Tensor:
    # What is left after a Newton step is the square of what there was, or the target.
    level = state.relative
    return torch.maximum(0.3 * level, 0.3 * target / level).clamp_(1e-5, 1e-2)


def _repeat(
    problem: Problem,
    factor: Factor | SharedFactor,
    state: State,
    which: Tensor,
    target: float,
    times: int = _CHORDS,
) -> State:
    """More steps with the same factor, for the samples in `which` while each gains a digit."""
    which = which & (state.relative > target)
    count = int(which.sum())
    if count == 0 or times == 0:
        return state
    if worth_leaving_out(count, state):
        index = which.nonzero().squeeze(-1)
        part, which = state.rows(index), which[index]
        problem, factor = problem.take(index), factor.rows(index)
        state.write(index, _repeat(problem, factor, part, which, target, times))
        return state
    step = factor.solve(problem.rows.restrict(state.residual))
    if count < len(which):
        step.masked_fill_(~which.unsqueeze(-1), 0)
    after = problem.state(state.multipliers - step)
    gains = which & (after.relative < 0.1 * state.relative)
    worse = (which & ~(after.relative < state.relative)).nonzero().squeeze(-1)
    if len(worse):
        after.write(worse, state.rows(worse))
    return _repeat(problem, factor, after, gains, target, times - 1)


def worth_leaving_out(count: int, state: State) -> bool:
    """Is it cheaper to copy `count` samples than to carry the others along?"""
    return count <= 0.7 * len(state.u) and state.u.numel() >= 2**14


def _tame(problem: Problem, state: State, step: Tensor) -> Tensor:
    """The steps, with those that run away replaced."""
    reach = problem.rows.basis.adjoint(step).abs_().amax(-1)
    wild = (~(reach <= 20 * _REACH)).nonzero().squeeze(-1)
    if len(wild) == 0:
        return step
    return step.index_copy(0, wild, _damped(problem.take(wild), state.rows(wild)))


def _damped(problem: Problem, state: State) -> Tensor:
    """The direction where Newton's is hopeless: some combination of rows has saturated.

    Such a combination would run away and hold all others back. Slopes w + μ limit it, with μ
    so that a step against no curvature at all moves u by about 200.
    """
    if problem.rows.rough is not None:
        flat = problem.rows.rough.solve(state.residual)
    else:
        flat = problem.direction(torch.ones_like(state.u), state.residual)
    mu = problem.rows.basis.adjoint(flat).abs().amax(-1, keepdim=True) / 200
    return problem.direction(problem.slopes(state.u) + mu, state.residual)


def _search(problem: Problem, state: State, step: Tensor) -> State:
    """The state at λ + αp, with α chosen for each sample from the size and sign of h(α)."""
    steepness = (step * problem.rows.restrict(state.residual)).sum(-1).abs()
    reach = problem.rows.basis.adjoint(step).abs().amax(-1)
    alpha = (_REACH / reach).nan_to_num(0.0).clamp(max=1)
    growing, low = torch.ones_like(alpha, dtype=torch.bool), torch.zeros_like(alpha)
    todo = torch.arange(len(step), device=step.device)
    result = state.rows(todo)
    for _ in range(_TRIALS):
        part, h0, a, floor = problem.take(todo), steepness[todo], alpha[todo], low[todo]
        moved = state.multipliers[todo] + a.unsqueeze(-1) * step[todo]
        trial = part.state(moved)
        result.write(todo, trial)
        h = (step[todo] * part.rows.restrict(trial.residual)).sum(-1)
        long = ~(h <= 0.5 * h0)
        # D still falls at a good part of its first rate: go further. exp needs it, whose
        # Newton step is one unit of u however far there is to go.
        short = (h < -0.3 * h0) & growing[todo]
        cut = (h0 / (h0 + h)).nan_to_num(nan=0.1).clamp(0.1, 0.5)
        further = torch.where(short, 4 * a, a)
        alpha[todo] = torch.where(long, floor + (a - floor) * cut, further)
        low[todo] = torch.where(short, a, floor)
        growing[todo] = short & (a < 16)
        todo = todo[long | short]
        if len(todo) == 0:
            break
    return result

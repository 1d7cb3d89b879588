"""The verdict on each sample: does its z keep the rule, has it stopped, is there a proof?

The rule is what CONVERGED promises: |A z − b| ≤ tol·(|b| + |A||z|) for each equation.
"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.certificate import certifies, likely
from taut.outcome import Status
from taut.solvers import base
from taut.solvers.base import Task, relative
from taut.solvers.step import Search, State

# The loosest level at which a residual that has stopped falling counts as rounding.
_FLOOR = 1e-13


@final
class Verdicts(NamedTuple):
    """What one look at n samples tells."""

    status: Int[Tensor, "n"]  # −1 where the work goes on
    proofs: Float[Tensor, "n I"] | None = None  # certificates of the infeasible ones
    settled: tuple[Tensor, State] | None = None  # samples that converge after a last correction

    def ended(self, which: Bool[Tensor, "n"], status: Status) -> "Verdicts":
        """With this one for the samples of `which` that have none."""
        return self._replace(status=self.status.masked_fill(which & (self.status < 0), int(status)))


def judge(
    search: Search, state: State, open: Bool[Tensor, "n"], stalls: Int[Tensor, "n"], iteration: int
) -> Verdicts:
    """A verdict on each sample; `stalls` counts the iterations that did not halve its residual."""
    task, rules, target = search.task, search.rules, search.target
    own = 8 * torch.finfo(state.z.dtype).eps
    if base.on_host(state.relative):
        smallest, largest = (x.item() for x in state.relative.aminmax())
        if largest <= target:
            return Verdicts(torch.zeros_like(stalls))
        undecided = smallest > max(target, rules.near * own) and largest < torch.inf
        if iteration == 0 and undecided and task.basis.left_out is None:
            return Verdicts(torch.full_like(stalls, -1))
    converged = state.relative <= target
    stopped = open & ~converged & _at_rounding(search, state, stalls)
    apart, status = None, (~converged).long().neg_()  # CONVERGED is 0
    if task.basis.left_out is not None:
        solved, alike = _solved_but_for_redundant(task, state, stalls)
        # What agrees to eps and yet breaks the rule is no contradiction: it stays undecided.
        stopped, apart = stopped | (open & ~converged & solved & alike), solved & ~alike
    status, settled = _by_the_rule(search, state, stopped, status)
    if apart is not None:
        apart = apart | _contradictory(task) if iteration == 0 else apart
        status = status.where((status >= 0) | ~apart, int(Status.INCONSISTENT))
    elif iteration > 1 and (not base.on_host(status) or bool(task.basis.condition.isnan().any())):
        contradicts = _contradicts(task, state) & task.basis.condition.isnan().any()
        status = status.where((status >= 0) | ~contradicts, int(Status.INCONSISTENT))
    proofs = None
    still = open & (status < 0) & (stalls > 0)
    if iteration > 1 and (not base.on_host(still) or bool(still.any())):
        proven, proofs = certificates(task, state.multipliers, still)
        status = status.where(~proven, int(Status.INFEASIBLE))
    status = status.where(state.relative < torch.inf, int(Status.NONFINITE))
    return Verdicts(status, proofs, settled)


def far(search: Search, state: State) -> Bool[Tensor, ""]:
    """Is every sample so far from solved that there is nothing to judge at the start?"""
    least = max(search.target, search.rules.near * 8 * torch.finfo(state.z.dtype).eps)
    return ((state.relative > least) & (state.relative < torch.inf)).all()


def glance(
    search: Search, state: State, open: Bool[Tensor, "n"], stalls: Int[Tensor, "n"], iteration: int
) -> tuple[Verdicts, Bool[Tensor, ""]]:
    """`judge` without a look, for devices; and whether that is not enough.

    It is not where a last correction, a proof, or equations that contradict may decide a sample.
    """
    converged = state.relative <= search.target
    stopped = open & ~converged & _at_rounding(search, state, stalls)
    meets = stopped & keeps(search, state.z, state.residual)
    status = (~(converged | meets)).long().neg_()
    more = (stopped & ~meets).any() | ~(state.relative < torch.inf).all()
    if iteration > 1:
        still, task = open & (status < 0) & (stalls > 0), search.task
        more = more | (still & _hopeful(task, *_candidates(task, state.multipliers))).any()
        more = more | task.basis.condition.isnan().any()
    return Verdicts(status), more


def _at_rounding(search: Search, state: State, stalls: Tensor) -> Bool[Tensor, "n"]:
    """Is what is left of the residual the rounding of u, or has it stopped falling near that?"""
    task, rules = search.task, search.rules
    own = 8 * torch.finfo(state.z.dtype).eps
    near = (stalls > 0) | (state.relative <= rules.near * own)
    if base.on_host(near) and not bool(near.any()):
        return near
    scale = task.rounding_scale(state.u, state.z)
    level = relative(state.residual, scale)
    condition = task.basis.condition.nan_to_num(torch.inf)
    coarse = torch.where(condition > 1e4, max(4 * own, _FLOOR), 4 * own)
    last = (relative(state.residual, _blurred(task, state, scale)) <= coarse) & (stalls > 2)
    return near & ((level <= own) | ((level <= 2 * own) & (stalls > 0)) | last)


def _blurred(task: Task, state: State, scale: Tensor) -> Float[Tensor, "n I"]:
    """`scale` with the terms of Aᵀλ: λ is large where equations are alike, and they cancel."""
    terms = task.basis.map.abs().adjoint(state.multipliers.abs())
    return scale + task.A.abs().apply(task.activation.slope(state.u) * terms)


def _by_the_rule(
    search: Search, state: State, stopped: Bool[Tensor, "n"], status: Tensor
) -> tuple[Tensor, tuple[Tensor, State] | None]:
    """CONVERGED for those of the samples that have stopped whose z keeps the rule.

    Where it does not, the last correction may: those are returned with it.
    """
    if base.on_host(stopped) and not bool(stopped.any()):
        return status, None
    meets = stopped & keeps(search, state.z, state.residual)
    status = status.where(~meets, int(Status.CONVERGED))
    index = (stopped & ~meets).nonzero().squeeze(-1)
    if len(index) == 0:
        return status, None
    part, good = settle(search.take(index), state.take(index))
    good = good.nonzero().squeeze(-1)
    index = index[good]
    return status.index_fill(0, index, int(Status.CONVERGED)), (index, part.take(good))


def keeps(search: Search, z: Tensor, residual: Tensor) -> Bool[Tensor, "n"]:
    """Does z keep the rule?"""
    return relative(residual, search.size_of_terms(z)) <= search.cap


def settle(search: Search, state: State) -> tuple[State, Bool[Tensor, "n"]]:
    """z −= W Aᵀ H⁻¹(A z − b), and u and λ with it; where the result keeps the rule.

    z = σ(v + Aᵀλ) inherits the rounding of that sum. Where v and Aᵀλ are much larger than z it
    exceeds the rule, though z itself has the digits to keep it. Where the correction is more than
    that rounding and z no longer σ(u) it is refused. Where σ is flat, u can move far and z not at
    all: there only z is corrected.
    """
    task, basis = search.task, search.task.basis
    multipliers, u, z, residual, level = state
    w = task.activation.slope(u)
    lower, upper = task.activation.range.bounds(z)
    size = task.v.abs() + u.abs() + basis.map.abs().adjoint(multipliers.abs())
    for _ in range(3):
        goal = residual - basis.disagreement(residual, search.size_of_terms(z))
        step = search.direction(w, goal)
        move = basis.map.adjoint(step)
        multipliers, u = multipliers + step, u + move
        z = (z + w * move).clamp(lower, upper)
        residual = task.residual(z)
    # Redundant equations whose b, given to eps, disagree by that meet in between.
    eps = torch.finfo(z.dtype).eps if basis.left_out is None else task.eps
    blur = 64 * eps * (z.abs() + w * size)
    near = (w * (u - state.u).abs() <= blur).all(-1)
    follows = ((task.activation.sigma(u) - z).abs() <= blur).all(-1, keepdim=True)
    good = (near | follows.squeeze(-1)) & keeps(search, z, residual)
    multipliers = multipliers.where(follows, state.multipliers)
    return State(multipliers, u.where(follows, state.u), z, residual, level), good


def _solved_but_for_redundant(task: Task, state: State, stalls: Tensor) -> tuple[Tensor, Tensor]:
    """Where all equations kept are solved, and where those left out, given to eps, agree."""
    left_out, eps = task.basis.left_out, task.eps
    assert left_out is not None  # noqa: S101
    scale = task.rounding_scale(state.u, state.z)
    if not base.on_host(stalls) or bool((stalls > 2).any()):
        scale = _blurred(task, state, scale).where((stalls > 2).unsqueeze(-1), scale)
    kept = relative(state.residual.masked_fill(left_out, 0), scale)
    solved = (kept <= 8 * torch.finfo(scale.dtype).eps) & left_out.any(-1)
    # An equation left out is as exact as those that imply it, given to eps, allow.
    alike = relative(state.residual, task.basis.folded(scale)) <= max(16 * eps, _FLOOR)
    return solved, alike


def _contradictory(task: Task) -> Bool[Tensor, "n"]:
    """Where b is plainly no A z, whatever z in a bounded range it was made from.

    In an unbounded range, b may be what is left of far larger terms.
    """
    if not task.activation.range.bounded:
        return torch.zeros_like(task.b[..., 0], dtype=torch.bool)
    lower, upper = task.activation.range.bounds(task.v)
    most = torch.maximum(lower.abs(), upper.abs()).expand_as(task.v)
    scale = task.b.abs() + task.A.abs().apply(most)
    return task.basis.contradictory(task.b, scale, task.eps)


def _contradicts(task: Task, state: State) -> Tensor:
    """Is the residual r orthogonal to the range of A? Then rᵀ(A z − b) = −rᵀb for every z."""
    # Its direction counts: of size 1, its products with small rows do not underflow.
    largest = state.residual.abs().amax(-1, keepdim=True)
    r = _scaled(state.residual, largest)
    image = task.A.adjoint(r).abs()
    size = task.A.abs().adjoint(r.abs())
    return (image <= 1e-8 * size).all(-1)


def _scaled(x: Tensor, size: Tensor) -> Tensor:
    """x over the power of 2 at `size`; torch 2.6 gives it the default dtype."""
    return torch.ldexp(x, -torch.frexp(size).exponent).to(x.dtype)


def _candidates(task: Task, multipliers: Float[Tensor, "n I"]) -> tuple[Tensor, Tensor]:
    """What may prove a sample infeasible: where λ has run, also without small entries."""
    multipliers = task.basis.leave(multipliers)
    # As far as λ has run, only its direction counts: bring it to size 1 by a power of 2, and to
    # the precision in which it will be returned.
    size = multipliers.abs().amax(-1, keepdim=True)
    candidate = _scaled(multipliers, size.nan_to_num(1.0))
    candidate = candidate.to(torch.float32).to(size.dtype) if task.eps > 1e-10 else candidate
    # λ = t·d + rest with t → ∞, and in a half-infinite range the rest may spoil the proof that d
    # is: leave out the small entries.
    return candidate, candidate.where(candidate.abs() > 0.1, 0)


def _hopeful(task: Task, candidate: Tensor, direction: Tensor) -> Bool[Tensor, "n"]:
    """Where one of them is worth the exact arithmetic of a proof."""
    one, other = (likely(x, task.A, task.b, task.activation) for x in (candidate, direction))
    return one | other


def certificates(
    task: Task, multipliers: Float[Tensor, "n I"], which: Bool[Tensor, "n"]
) -> tuple[Tensor, Tensor]:
    """Which samples of `which` are proven infeasible, and by which multipliers."""
    candidate, direction = _candidates(task, multipliers)
    if not base.on_host(which):
        if not any(base.look((which & _hopeful(task, candidate, direction)).any())):
            return torch.zeros_like(which), candidate
    proven = certifies(candidate, task.A, task.b, task.activation, which)
    if not task.activation.range.bounded:
        also = certifies(direction, task.A, task.b, task.activation, which & ~proven)
        candidate = torch.where(also.unsqueeze(-1), direction, candidate)
        proven = proven | also
    return proven, candidate

"""Newton's method on D: the loop over iterations, and the verdict on each sample."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.backends import Rules
from taut.certificate import certifies
from taut.outcome import Outcome, Status
from taut.problems import Linear, Problem
from taut.solvers.base import Solver, Task, enter, leave, relative
from taut.solvers.step import Search, State, newton_step, worth_leaving_out

# The loosest level at which a residual that has stopped falling counts as rounding.
_FLOOR = 1e-13


@final
@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method with a line search on the slope of D; the default.

    Each sample stops by itself when |A z − b| is within `tol` of |b| + |A||z|; None asks for the
    rounding level of v's dtype. Finished samples stand still, and are left out where that is
    cheaper.

    The solve runs in float64 whatever the dtype of v: that costs little, and a float32 z is then
    the rounding of the right one. `dtype=None` solves in the dtype of v, for hardware that is slow
    in float64; with large logits a float32 u = v + Aᵀλ is itself too coarse for a small residual.

    >>> import taut
    >>> A, b = torch.ones(1, 3), torch.tensor([2.0])
    >>> taut.project(torch.zeros(3), A, b, activation="sigmoid", solver=Newton(tol=1e-6)).z
    tensor([0.6667, 0.6667, 0.6667])
    """

    tol: float | None = None
    max_iterations: int = 200
    dtype: torch.dtype | None = torch.float64

    def __post_init__(self) -> None:
        if self.tol is not None and not self.tol > 0:
            raise ValueError(f"tol must be positive or None; got {self.tol!r}.")
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations must be ≥ 0; got {self.max_iterations!r}.")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32, float64 or None; got {self.dtype!r}.")

    @cached_property
    def rules(self) -> Rules:
        """Every threshold of the method."""
        return Rules(self.tol, self.max_iterations, self.dtype)

    def solve(self, problem: Problem) -> Outcome:
        outcome = problem.prepared.backend.attempt(problem, self.rules)
        if not outcome.failed:
            return outcome
        method = _METHODS[type(problem)]
        if outcome.failed == len(outcome.status):
            return method(problem, self.rules)
        left = outcome.left()
        return outcome.write(left, method(problem.take(left), self.rules))


def equations(problem: Linear, rules: Rules) -> Outcome:
    """Newton's method in torch: a verdict on every sample."""
    dtype = problem.v.dtype
    task, start, finite = enter(problem, rules.dtype or dtype)
    if len(start) == 0:
        return Outcome.open(problem.v, start.shape[-1])
    search = Search(task, rules, size_of_b(task), rules.target(dtype), rules.share(dtype))
    return leave(problem, task, finite, _iterate(search, start))


_METHODS: dict[type[Problem], Any] = {Linear: equations}


def _iterate(search: Search, start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """λ, u, z, iterations and status of every sample."""
    state = _start(search, start)
    progress, found = _Progress.start(state), None
    for iteration in range(search.rules.max_iterations + 1):
        status, proofs = _judge(search, state, progress, iteration)
        if iteration == search.rules.max_iterations:
            status = status.where(status >= 0, int(Status.MAX_ITERATIONS))
        progress = progress.after(state, status, proofs, iteration)
        count = int(progress.open.sum())
        if count == 0 or worth_leaving_out(count, state):
            task = search.task
            multipliers = task.basis.leave(state.multipliers)
            if task.basis.left_out is not None:
                multipliers = task.basis.smallest(task.A, task.v, multipliers, task.eps)
            if progress.proofs is not None:
                proven = (progress.status == Status.INFEASIBLE).unsqueeze(-1)
                multipliers = torch.where(proven, progress.proofs, multipliers)
            here = (multipliers, state.u, state.z, progress.iterations, progress.status)
            if found is None:
                found = here  # samples still open will be written over
            else:
                for mine, theirs in zip(found, here, strict=True):
                    mine.index_copy_(0, progress.place, theirs)
            if count == 0:
                return found
            left = progress.open.nonzero().squeeze(-1)
            search, state, progress = search.take(left), state.take(left), progress.take(left)
        closed = None if count == len(progress.open) else ~progress.open
        state = newton_step(search, state, closed)
    raise AssertionError("unreachable: the last iteration decides every sample")


@final
class _Progress(NamedTuple):
    """What has become of the samples being worked on; status −1 is not decided."""

    place: Int[Tensor, "n"]  # in the batch
    status: Int[Tensor, "n"]
    iterations: Int[Tensor, "n"]
    best: Float[Tensor, "n"]  # the smallest `relative` so far
    stalls: Int[Tensor, "n"]  # for how many iterations it has not been halved
    proofs: Float[Tensor, "n I"] | None  # certificates of the infeasible ones

    @staticmethod
    def start(state: State) -> "_Progress":
        place = torch.arange(len(state.u), device=state.u.device)
        best = torch.full_like(state.relative, torch.inf)
        zero = torch.zeros_like(place)
        return _Progress(place, zero - 1, zero, best, zero, None)

    @property
    def open(self) -> Bool[Tensor, "n"]:
        return self.status < 0

    def after(
        self, state: State, status: Tensor, proofs: Tensor | None, iteration: int
    ) -> "_Progress":
        """With the verdicts of this iteration; earlier ones stand."""
        fresh = self.open & (status >= 0)
        if proofs is None:
            proofs = self.proofs
        elif self.proofs is not None:
            proofs = torch.where(fresh.unsqueeze(-1), proofs, self.proofs)
        return _Progress(
            self.place,
            torch.where(fresh, status, self.status),
            self.iterations.masked_fill(fresh, iteration),
            torch.minimum(self.best, state.relative),
            self.stalled(state),
            proofs,
        )

    def stalled(self, state: State) -> Int[Tensor, "n"]:
        """`stalls` with this state in it."""
        return (self.stalls + 1).masked_fill_(state.relative < 0.5 * self.best, 0)

    def take(self, index: Tensor) -> "_Progress":
        place, status, iterations, best, stalls = (x[index] for x in self[:5])
        proofs = None if self.proofs is None else self.proofs[index]
        return _Progress(place, status, iterations, best, stalls, proofs)


def _judge(
    search: Search, state: State, progress: _Progress, iteration: int
) -> tuple[Tensor, Tensor | None]:
    """A Status for each sample, or −1 where the work goes on; and certificates."""
    task, rules, target = search.task, search.rules, search.target
    own = 8 * torch.finfo(state.z.dtype).eps
    smallest, largest = (x.item() for x in state.relative.aminmax())
    if largest <= target:
        return torch.zeros_like(progress.place), None
    undecided = smallest > max(target, rules.near * own) and largest < torch.inf
    if iteration == 0 and undecided and task.basis.left_out is None:
        return torch.full_like(progress.place, -1), None
    converged, stalls = state.relative <= target, progress.stalled(state)
    converged = converged | _at_rounding(search, state, stalls)
    status = (~converged).long().neg_()  # CONVERGED is 0
    if task.basis.left_out is not None:
        status = _redundant(task, state, status)
    elif iteration > 1 and bool(task.basis.condition.isnan().any()):
        contradicts = _contradicts(task, state)
        status = status.where(converged | ~contradicts, int(Status.INCONSISTENT))
    proofs = None
    still = progress.open & (status < 0) & (stalls > 0)
    if iteration > 1 and bool(still.any()):
        proven, proofs = _certificates(task, state, still)
        status = status.where(~proven, int(Status.INFEASIBLE))
    return status.where(state.relative < torch.inf, int(Status.NONFINITE)), proofs


def _at_rounding(search: Search, state: State, stalls: Tensor) -> Bool[Tensor, "n"]:
    """Is what is left of the residual the rounding of u, or has it stopped falling near that?"""
    task, rules = search.task, search.rules
    own = 8 * torch.finfo(state.z.dtype).eps
    floor = max(4 * own, _FLOOR)
    near = state.relative <= torch.where(stalls > 0, min(1e6 * floor, 1e-2), rules.near * own)
    if not bool(near.any()):
        return near
    level = relative(state.residual, task.rounding_scale(state.u, state.z))
    condition = task.basis.condition.nan_to_num(torch.inf)
    coarse = torch.where(condition > 1e4, floor, 4 * own)
    stuck = ((level <= 2 * own) & (stalls > 0)) | ((level <= coarse) & (stalls > 2))
    return near & ((level <= own) | stuck)


def _redundant(task: Task, state: State, status: Tensor) -> Tensor:
    """The verdicts on samples with equations that others imply: do their b agree?"""
    left_out, eps = task.basis.left_out, task.eps
    assert left_out is not None  # noqa: S101
    scale = task.rounding_scale(state.u, state.z)
    kept = relative(state.residual.masked_fill(left_out, 0), scale)
    solved = (kept <= 8 * torch.finfo(scale.dtype).eps) & left_out.any(-1) & (status < 0)
    # An equation left out is as exact as those that imply it, given to eps, allow.
    alike = relative(state.residual, task.basis.folded(scale)) <= max(16 * eps, _FLOOR)
    status = status.where(~(solved & alike), int(Status.CONVERGED))
    apart = task.basis.contradictory(task.b, eps)
    return status.where((status >= 0) | ~(apart | solved), int(Status.INCONSISTENT))


def _start(search: Search, start: Tensor) -> State:
    # States are written to: `start` itself must not be part of one.
    task = search.task
    state = search.state(task.basis.enter(task.A, start).clone())
    lost = ~(state.residual.abs() <= search.rules.lost * (1 + search.size_of_b)).all(-1)
    lost = lost.nonzero().squeeze(-1)
    if len(lost):
        state.write(lost, _lower(search.take(lost), state.take(lost)))
    return state


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


def size_of_b(task: Task) -> Tensor:
    """|b|; for an entry that is 0, what the others let one expect of its equation."""
    size = task.b.abs()
    if size.numel() == 0 or size.amin().item() > 0:
        return size
    # With exp, Σz = 0 is reached only by z → 0: without a size of its own to compare with, no
    # residual would ever be small.
    terms = task.A.abs().apply(torch.ones_like(task.v))
    natural = torch.where(terms > 0, size / terms, torch.zeros_like(size)).amax(-1, keepdim=True)
    start = task.activation.sigma(task.v).abs().amax(-1, keepdim=True).clamp(1e-30, 1)
    expected = (terms * torch.where(natural == 0, start, natural)).clamp(max=1)
    return torch.where(size == 0, expected, size)


def _contradicts(task: Task, state: State) -> Tensor:
    """Is the residual r orthogonal to the range of A? Then rᵀ(A z − b) = −rᵀb for every z."""
    image = task.A.adjoint(state.residual).abs()
    size = task.A.abs().adjoint(state.residual.abs())
    return (image <= 1e-8 * size).all(-1)


def _certificates(task: Task, state: State, which: Bool[Tensor, "n"]) -> tuple[Tensor, Tensor]:
    """Which samples of `which` are proven infeasible, and by which multipliers."""
    multipliers = task.basis.leave(state.multipliers)
    # As far as λ has run, only its direction counts: bring it to size 1 by a power of 2, and to
    # the precision in which it will be returned.
    size = multipliers.abs().amax(-1, keepdim=True)
    candidate = torch.ldexp(multipliers, -torch.frexp(size.nan_to_num(1.0)).exponent)
    candidate = candidate.to(torch.float32).to(size.dtype) if task.eps > 1e-10 else candidate
    proven = certifies(candidate, task.A, task.b, task.activation, which)
    if not task.activation.range.bounded:
        # λ = t·d + rest with t → ∞, and in a half-infinite range the rest may spoil the proof
        # that d is: leave out the small entries.
        direction = candidate.where(candidate.abs() > 0.1, 0)
        also = certifies(direction, task.A, task.b, task.activation, which & ~proven)
        candidate = torch.where(also.unsqueeze(-1), direction, candidate)
        proven = proven | also
    return proven, candidate

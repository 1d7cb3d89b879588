"""Newton's method on D: the loop over iterations, and the verdict on each sample."""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.certificate import certifies
from taut.dual import Dual
from taut.rows import Rows
from taut.solution import Status
from taut.solver import Outcome, Solver, relative, rounding_scale
from taut.step import Problem, State, newton_step, worth_leaving_out


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

    def rows(self, index: Tensor) -> "_Progress":
        place, status, iterations, best, stalls = (x[index] for x in self[:5])
        proofs = None if self.proofs is None else self.proofs[index]
        return _Progress(place, status, iterations, best, stalls, proofs)


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

    # The loosest level at which a residual that has stopped falling counts as rounding.
    _floor = 1e-13

    def __post_init__(self) -> None:
        if self.tol is not None and not self.tol > 0:
            raise ValueError(f"tol must be positive or None; got {self.tol!r}.")
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations must be ≥ 0; got {self.max_iterations!r}.")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32, float64 or None; got {self.dtype!r}.")

    def target(self, dtype: torch.dtype, eps: float) -> float:
        """The relative residual that is enough, solving in `dtype` for numbers given to `eps`."""
        return self.tol or max(2 * eps, 8 * torch.finfo(dtype).eps)

    def solve(
        self, dual: Dual, rows: Rows, init: Float[Tensor, "N I"], group_size: int, eps: float
    ) -> Outcome:
        if len(init) == 0:
            return Outcome.like(dual, init)
        target = self.target(init.dtype, eps)
        problem = Problem(dual, rows, _size_of_b(dual), share=1.0 if target < 1e-12 else 0.01)
        state = _start(problem, init)
        progress, outcome = _Progress.start(state), None
        for iteration in range(self.max_iterations + 1):
            status, proofs = self._judge(problem, state, progress, iteration, target, eps)
            if iteration == self.max_iterations:
                status = status.where(status >= 0, int(Status.MAX_ITERATIONS))
            progress = progress.after(state, status, proofs, iteration)
            count = int(progress.open.sum())
            if count == 0 or worth_leaving_out(count, state):
                multipliers = smallest(problem.rows, problem.dual, state.multipliers, eps)
                if progress.proofs is not None:
                    proven = (progress.status == Status.INFEASIBLE).unsqueeze(-1)
                    multipliers = torch.where(proven, progress.proofs, multipliers)
                here = Outcome(multipliers, state.u, state.z, progress.iterations, progress.status)
                if outcome is None:
                    outcome = here  # samples still open will be written over
                else:
                    outcome.write(progress.place, here)
                if count == 0:
                    return outcome
                left = progress.open.nonzero().squeeze(-1)
                problem, state, progress = problem.take(left), state.rows(left), progress.rows(left)
            closed = None if count == len(progress.open) else ~progress.open
            state = newton_step(problem, state, target, closed)
        raise AssertionError("unreachable: the last iteration decides every sample")

    def _judge(
        self,
        problem: Problem,
        state: State,
        progress: _Progress,
        iteration: int,
        target: float,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        """A Status for each sample, or −1 where the work goes on; and certificates."""
        own = 8 * torch.finfo(state.z.dtype).eps
        floor = max(4 * own, self._floor)
        smallest, largest = (x.item() for x in state.relative.aminmax())
        if largest <= target:
            return torch.zeros_like(progress.place), None
        undecided = smallest > max(target, 1e3 * own) and largest < torch.inf
        if iteration == 0 and undecided and problem.rows.left_out is None:
            return torch.full_like(progress.place, -1), None
        converged, stalls = state.relative <= target, progress.stalled(state)
        near = state.relative <= torch.where(stalls > 0, min(1e6 * floor, 1e-2), 1e3 * own)
        if bool(near.any()):
            # Is what is left the rounding of u, or has it stopped falling?
            level = relative(state.residual, rounding_scale(problem.dual, state.u, state.z))
            condition = problem.rows.condition.nan_to_num(torch.inf)
            coarse = torch.where(condition > 1e4, floor, 4 * own)
            stuck = ((level <= 2 * own) & (stalls > 0)) | ((level <= coarse) & (stalls > 2))
            converged = converged | (near & ((level <= own) | stuck))
        status = (~converged).long().neg_()  # CONVERGED is 0
        if problem.rows.left_out is not None:
            status = self._redundant(problem, state, status, eps)
        elif iteration > 1 and bool(problem.rows.condition.isnan().any()):
            contradicts = _contradicts(problem, state)
            status = status.where(converged | ~contradicts, int(Status.INCONSISTENT))
        proofs = None
        still = progress.open & (status < 0) & (stalls > 0)
        if iteration > 1 and bool(still.any()):
            proven, proofs = _certificates(problem, state, still, eps)
            status = status.where(~proven, int(Status.INFEASIBLE))
        return status.where(state.relative < torch.inf, int(Status.NONFINITE)), proofs

    def _redundant(self, problem: Problem, state: State, status: Tensor, eps: float) -> Tensor:
        """The verdicts on samples with rows that others imply: do their b agree?"""
        left_out = torch.as_tensor(problem.rows.left_out, device=state.u.device)
        scale = rounding_scale(problem.dual, state.u, state.z)
        kept = relative(state.residual.masked_fill(left_out, 0), scale)
        solved = (kept <= 8 * torch.finfo(scale.dtype).eps) & left_out.any(-1) & (status < 0)
        # Of numbers given to eps, more than that cannot be asked of the rows left out.
        alike = relative(state.residual, problem.rows.folded(scale)) <= max(16 * eps, self._floor)
        status = status.where(~(solved & alike), int(Status.CONVERGED))
        inconsistent = contradictory(problem.rows, problem.dual.b, eps) | solved
        return status.where((status >= 0) | ~inconsistent, int(Status.INCONSISTENT))


def _start(problem: Problem, init: Tensor) -> State:
    # States are written to: `init` itself must not be part of one.
    state = problem.state(problem.rows.enter(problem.dual.A, init).clone())
    if problem.dual.activation.range.bounded:
        return state
    lost = ~(state.residual.abs() <= 1e4 * (1 + problem.size_of_b)).all(-1)
    lost = lost.nonzero().squeeze(-1)
    if len(lost):
        state.write(lost, _lower(problem.take(lost), state.rows(lost)))
    return state


def _lower(problem: Problem, state: State) -> State:
    """A better start where exp begins far too high, if there is one.

    Only the part of v in the null space of A matters, so the rest can be taken out; and then
    u can move down as one: v → v − Aᵀ(AAᵀ)⁻¹A(v + s·1), first with s = 0, then s = max u. Before
    that, λ = 0: a start that was given may be the culprit.
    """
    v = problem.dual.v
    multipliers, shift = torch.zeros_like(state.multipliers), torch.zeros_like(v[:, :1])
    for attempt in range(3):
        if attempt > 0:
            multipliers = problem.direction(torch.ones_like(v), problem.dual.A.apply(v + shift))
        trial = problem.state(multipliers)
        if attempt > 0:
            shift = trial.u.amax(-1, keepdim=True)
        size, before = (x.residual.abs().amax(-1).nan_to_num(torch.inf) for x in (trial, state))
        better = (size < before).nonzero().squeeze(-1)
        state.write(better, trial.rows(better))
    return state


def contradictory(rows: Rows, b: Float[Tensor, "n I"], eps: float) -> Bool[Tensor, "n"]:
    """Where b is plainly out of the range of an A with redundant rows, given to `eps`."""
    gap = b - rows.project(b)
    return (gap.abs() > eps**0.5 * b.abs().amax(-1, keepdim=True)).any(-1)


def smallest(rows: Rows, dual: Dual, multipliers: Float[Tensor, "n I"], eps: float) -> Tensor:
    """The multipliers of A from those of the basis: of all that give u, the smallest."""
    raw = rows.leave(multipliers)
    if rows.projector is None:
        return raw
    least = rows.project(raw)
    # Rows that are redundant only to the precision of A do move u when λ is large.
    moved = dual.A.adjoint(least - raw).abs()
    scale = dual.A.abs().adjoint(least.abs() + raw.abs()) + dual.v.abs()
    return torch.where((moved <= 8 * eps * scale).all(-1, keepdim=True), least, raw)


def _size_of_b(dual: Dual) -> Tensor:
    """|b|; for an entry that is 0, what the others let one expect of its row."""
    size = dual.b.abs()
    if size.numel() == 0 or size.amin().item() > 0:
        return size
    # With exp, Σz = 0 is reached only by z → 0: without a size of its own to compare with, no
    # residual would ever be small.
    row = dual.A.abs().apply(torch.ones_like(dual.v))
    natural = torch.where(row > 0, size / row, torch.zeros_like(size)).amax(-1, keepdim=True)
    start = dual.activation.sigma(dual.v).abs().amax(-1, keepdim=True).clamp(1e-30, 1)
    expected = (row * torch.where(natural == 0, start, natural)).clamp(max=1)
    return torch.where(size == 0, expected, size)


def _contradicts(problem: Problem, state: State) -> Tensor:
    """Is the residual r orthogonal to the range of A? Then rᵀ(A z − b) = −rᵀb for every z."""
    A = problem.dual.A
    image, size = A.adjoint(state.residual).abs(), A.abs().adjoint(state.residual.abs())
    return (image <= 1e-8 * size).all(-1)


def _certificates(
    problem: Problem, state: State, which: Bool[Tensor, "n"], eps: float
) -> tuple[Tensor, Tensor]:
    """Which samples of `which` are proven infeasible, and by which multipliers."""
    dual, multipliers = problem.dual, problem.rows.leave(state.multipliers)
    # As far as λ has run, only its direction counts: bring it to size 1 by a power of 2, and to
    # the precision in which it will be returned.
    size = multipliers.abs().amax(-1, keepdim=True)
    candidate = torch.ldexp(multipliers, -torch.frexp(size.nan_to_num(1.0)).exponent)
    candidate = candidate.to(torch.float32).to(size.dtype) if eps > 1e-10 else candidate
    proven = certifies(candidate, dual.A.adjoint(candidate), dual, which)
    if not dual.activation.range.bounded:
        # λ = t·d + rest with t → ∞, and in a half-infinite range the rest may spoil the proof
        # that d is: leave out the small entries.
        direction = candidate.where(candidate.abs() > 0.1, 0)
        also = certifies(direction, dual.A.adjoint(direction), dual, which & ~proven)
        candidate = torch.where(also.unsqueeze(-1), direction, candidate)
        proven = proven | also
    return proven, candidate

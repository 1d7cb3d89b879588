"""Two ways to minimise D: Newton, and the paper's gradient descent.

A solver takes the problems of a batch and says, for each sample alone, how it ended.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.certificate import certifies
from taut.dual import Dual
from taut.factor import solve_gram
from taut.rows import Rows
from taut.solution import Status


@final
@dataclass(frozen=True, eq=False)
class Outcome:
    """What a solver found: λ, u = v + Aᵀλ, and the verdict on each sample."""

    multipliers: Float[Tensor, "N I"]
    u: Float[Tensor, "N K"]
    iterations: Int[Tensor, "N"]
    status: Int[Tensor, "N"]


class Solver(ABC):
    """How the multipliers are found."""

    @abstractmethod
    def solve(self, dual: Dual, rows: Rows, init: Float[Tensor, "N I"], group_size: int) -> Outcome:
        """Minimise D for N samples from `init`; every number given is finite.

        `group_size` consecutive samples form a group, for solvers that decide by groups.
        """


def relative_residual(dual: Dual, u: Tensor, z: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    """max_i |A z − b|_i over the size of what is rounded in it: |b| + |A|(|z| + w(|u| + |v|)).

    The first terms are those of the sum A z − b. The last is what z = σ(u) inherits from the
    rounding of u = v + Aᵀλ; with large logits it is the larger part.
    """
    spread = z.abs() + w * (u.abs() + dual.v.abs())
    scale = dual.b.abs() + dual.A.abs().apply(spread)
    ratio = torch.where(residual == 0, torch.zeros_like(residual), residual.abs() / scale)
    if ratio.shape[-1] == 0:
        return ratio.new_zeros(ratio.shape[:-1])
    return ratio.amax(-1).nan_to_num(nan=torch.inf)


@final
@dataclass(frozen=True, eq=False)
class _State:
    """The samples still being worked on; `index` is their place in the batch."""

    index: Int[Tensor, "n"]
    multipliers: Float[Tensor, "n I"]  # of the basis Q = T A
    u: Float[Tensor, "n K"]
    z: Float[Tensor, "n K"]
    residual: Float[Tensor, "n I"]  # A z − b
    gradient: Float[Tensor, "n I"]  # T(A z − b)
    best: Float[Tensor, "n"]  # smallest relative residual so far

    def rows(self, index: Tensor) -> "_State":
        return _State(*(getattr(self, f.name)[index] for f in fields(self)))

    def merge(self, index: Tensor, other: "_State") -> "_State":
        return _State(
            *(
                getattr(self, f.name).index_copy(0, index, getattr(other, f.name))
                for f in fields(self)
            )
        )


@final
@dataclass(frozen=True, eq=False)
class _Problem:
    """D in the coordinates of the basis: u = v + Qᵀλ, ∇ = T(A z − b), ∇² = Q diag(w) Qᵀ."""

    dual: Dual
    rows: Rows

    def state(self, index: Tensor, multipliers: Tensor, best: Tensor) -> _State:
        u = self.dual.v + self.rows.basis.adjoint(multipliers)
        z = self.dual.activation.sigma(u)
        residual = self.dual.residual(z)
        return _State(index, multipliers, u, z, residual, self.rows.restrict(residual), best)

    def direction(self, w: Tensor, gradient: Tensor) -> Tensor:
        """The Newton direction −H⁻¹g."""
        return -solve_gram(self.rows.basis, w, gradient, self.rows.left_out)

    def take(self, index: Tensor) -> "_Problem":
        return _Problem(self.dual.rows(index), self.rows.rows(index))


@final
@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method with a line search on the slope of D; the default.

    Each sample stops by itself when |A z − b| is within `tol` of its scale; None asks for the
    rounding level of the dtype. Finished samples cost nothing more.

    The step p is accepted by the derivative of D along it, h(α) = pᵀ∇D(λ + αp), which rises from
    −|h(0)|: a step is too long when h has become clearly positive. Differences of D itself, as
    in Armijo's rule, drown in rounding long before the residual does.

    >>> import taut
    >>> A, b = torch.ones(1, 3), torch.tensor([2.0])
    >>> taut.project(torch.zeros(3), A, b, activation="sigmoid", solver=Newton(tol=1e-6)).z
    tensor([0.6667, 0.6667, 0.6667])
    """

    tol: float | None = None
    max_iterations: int = 200

    # u moves at most this far in the first trial of a line search: σ is a different function there.
    _reach = 5.0
    # Loosest level at which a residual that has stopped falling counts as rounding.
    _floor = 1e-13

    def __post_init__(self) -> None:
        if self.tol is not None and not self.tol > 0:
            raise ValueError(f"tol must be positive or None; got {self.tol!r}.")
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations must be ≥ 0; got {self.max_iterations!r}.")

    def solve(self, dual: Dual, rows: Rows, init: Float[Tensor, "N I"], group_size: int) -> Outcome:
        problem = _Problem(dual, rows)
        state = self._start(problem, init)
        outcome = Outcome(
            torch.zeros_like(init),
            torch.zeros_like(dual.v),
            torch.zeros_like(state.index),
            torch.full_like(state.index, Status.MAX_ITERATIONS),
        )
        for iteration in range(self.max_iterations + 1):
            w = problem.dual.activation.slope(state.u)
            status, state = self._judge(problem, state, w, iteration)
            if iteration == self.max_iterations:
                status = status.where(status >= 0, int(Status.MAX_ITERATIONS))
            decided = status >= 0
            if bool(decided.any()):
                _write(outcome, problem, state, status, iteration, decided.nonzero().squeeze(-1))
                left = (~decided).nonzero().squeeze(-1)
                if len(left) == 0:
                    break
                problem, state, w = problem.take(left), state.rows(left), w[left]
            state = self._search(problem, state, problem.direction(w, state.gradient))
        return outcome

    def _start(self, problem: _Problem, init: Tensor) -> _State:
        index = torch.arange(len(init), device=init.device)
        best = torch.full_like(problem.dual.v[:, 0], torch.inf)
        state = problem.state(index, problem.rows.enter(problem.dual.A, init), best)
        for attempt in range(2):
            lost = (~state.gradient.isfinite().all(-1)).nonzero().squeeze(-1)
            if len(lost) == 0:
                break
            # exp overflowed. Only the part of v in the null space of A matters, so remove the
            # rest: v → v − Aᵀ(AAᵀ)⁻¹A(v + s·1), without and then with a downward shift s.
            part = problem.take(lost)
            v = part.dual.v
            shift = v.amax(-1, keepdim=True) * attempt
            image = part.rows.restrict(part.dual.A.apply(v + shift))
            multipliers = part.direction(torch.ones_like(v), image)
            state = state.merge(lost, part.state(index[lost], multipliers, best[lost]))
        return state

    def _judge(
        self, problem: _Problem, state: _State, w: Tensor, iteration: int
    ) -> tuple[Tensor, _State]:
        """A Status for each sample, or −1 where the work goes on."""
        eps = torch.finfo(w.dtype).eps
        target = self.tol or 8 * eps
        floor = max(target, 16 * eps, self._floor)
        relative = relative_residual(problem.dual, state.u, state.z, w, state.residual)
        stalled = (relative <= floor) & (relative >= 0.5 * state.best)
        status = torch.where((relative <= target) | stalled, int(Status.CONVERGED), -1)
        if problem.rows.projector is not None:
            # The rows kept are satisfied to rounding and a redundant one is not.
            kept = state.residual.masked_fill(problem.rows.left_out, 0)
            solved = relative_residual(problem.dual, state.u, state.z, w, kept) <= target
            status = status.where((status == 0) | ~solved, int(Status.INCONSISTENT))
        if iteration > 1:
            multipliers = problem.rows.leave(state.multipliers)
            y = problem.rows.basis.adjoint(state.multipliers)
            proven = certifies(y, multipliers, problem.dual.b, problem.dual.activation)
            status = status.where((status == 0) | ~proven, int(Status.INFEASIBLE))
        overflow = ~state.gradient.isfinite().all(-1)
        status = status.where(~overflow, int(Status.NONFINITE))
        return status, replace(state, best=torch.minimum(state.best, relative))

    def _search(self, problem: _Problem, state: _State, step: Tensor) -> _State:
        """The state at λ + αp, with α chosen for each sample from the sign and size of h(α)."""
        steepness = (step * state.gradient).sum(-1).abs()
        result = problem.state(state.index, state.multipliers + step, state.best)
        reach = (result.u - state.u).abs().amax(-1) if state.u.shape[-1] else steepness
        far = ~(reach <= self._reach)
        slope = (step * result.gradient).sum(-1)
        alpha = torch.ones_like(steepness)
        alpha = torch.where(far, (self._reach / reach).nan_to_num(nan=0.0), alpha)
        growing = far
        todo = (far | ~(slope <= 0.5 * steepness)).nonzero().squeeze(-1)
        shrink = (steepness / (steepness + slope)).nan_to_num(nan=0.1).clamp(0.1, 0.5)
        alpha = torch.where(far, alpha, shrink)
        for _ in range(60):
            if len(todo) == 0:
                break
            part, h0, a = problem.take(todo), steepness[todo], alpha[todo]
            moved = state.multipliers[todo] + a[:, None] * step[todo]
            trial = part.state(state.index[todo], moved, state.best[todo])
            result = result.merge(todo, trial)
            h = (step[todo] * trial.gradient).sum(-1)
            long = ~(h <= 0.5 * h0)
            # D still falls at half its first rate at the end of a shortened step: go further.
            short = (h < -0.5 * h0) & growing[todo] & (a < 1)
            cut = (h0 / (h0 + h)).nan_to_num(nan=0.1).clamp(0.1, 0.5)
            alpha[todo] = torch.where(long, a * cut, torch.where(short, (4 * a).clamp(max=1), a))
            growing = growing.index_put((todo,), short)
            todo = todo[long | short]
        return result


def _write(
    outcome: Outcome,
    problem: _Problem,
    state: _State,
    status: Tensor,
    iteration: int,
    decided: Tensor,
) -> None:
    index = state.index[decided]
    outcome.multipliers[index] = problem.rows.rows(decided).leave(state.multipliers[decided])
    outcome.u[index] = state.u[decided]
    outcome.iterations[index] = iteration
    outcome.status[index] = status[decided]


@final
@dataclass(frozen=True)
class GradientDescent(Solver):
    """The paper's solver (Sec. 4): gradient descent on λ, one step size for a group of samples.

    The last batch dimension of v is a group; leading dimensions are independent groups that run
    at once. λ ← λ − α∇D with α from `step`, halved down to `min_step` when the group's average
    loss does not fall, until its average change is below `threshold`, at most `max_iterations`.

    What the text leaves open, decided here: α is kept from one iteration to the next; a trial that
    is rejected counts as an iteration; the gradient is that of each sample's own loss, the average
    is taken for the decisions only. A sample is CONVERGED when its residual is within `threshold`
    of its scale: the paper's rule itself says nothing about A z = b.

    >>> import taut
    >>> solver = GradientDescent(threshold=1e-6)
    >>> A, b = torch.ones(1, 3), torch.tensor([2.0])
    >>> solution = taut.project(
    ...     torch.zeros(3), A, b, activation="sigmoid", solver=solver, on_failure="return"
    ... )
    >>> solution.residual < 0.01
    tensor(True)
    """

    step: float = 0.1
    min_step: float = 1e-6
    threshold: float = 5e-3
    max_iterations: int = 1000

    def __post_init__(self) -> None:
        if not (self.step > 0 and self.min_step > 0 and self.threshold >= 0):
            raise ValueError(
                "GradientDescent needs step > 0, min_step > 0 and threshold ≥ 0; got "
                f"step={self.step!r}, min_step={self.min_step!r}, threshold={self.threshold!r}."
            )

    def solve(self, dual: Dual, rows: Rows, init: Float[Tensor, "N I"], group_size: int) -> Outcome:
        size = max(1, group_size)
        groups = len(dual.v) // size
        place = torch.arange(len(dual.v), device=dual.v.device).reshape(groups, size)
        multipliers = init.clone()
        iterations = torch.zeros(groups, dtype=torch.long, device=dual.v.device)
        active = torch.arange(groups, device=dual.v.device)
        part, point = dual, init
        alpha = torch.full((groups,), self.step, dtype=dual.v.dtype, device=dual.v.device)
        loss = dual.value(point).reshape(groups, size).mean(-1)
        gradient = dual.gradient(point)
        for iteration in range(1, self.max_iterations + 1):
            if len(active) == 0:
                break
            trial = point - alpha.repeat_interleave(size)[:, None] * gradient
            trial_loss = part.value(trial).reshape(-1, size).mean(-1)
            # Sec. 4: "the step-size parameter set to 0.1 and then halved each time if too high"
            falls = trial_loss < loss
            alpha = torch.where(falls, alpha, 0.5 * alpha)
            # Sec. 4: "a threshold of 5e-3 for the average change in the loss function w.r.t. λ"
            settled = falls & (loss - trial_loss < self.threshold)
            finished = settled | (alpha < self.min_step)
            point = torch.where(falls.repeat_interleave(size)[:, None], trial, point)
            loss = torch.where(falls, trial_loss, loss)
            iterations[active] = iteration
            if bool(finished.any()):
                multipliers[place[active].flatten()] = point
                left = (~finished).nonzero().squeeze(-1)
                active, alpha, loss = active[left], alpha[left], loss[left]
                samples = place[active].flatten()
                part, point = dual.rows(samples), multipliers[samples]
            gradient = part.gradient(point)
        multipliers[place[active].flatten()] = point
        return self._outcome(dual, multipliers, iterations.repeat_interleave(size))

    def _outcome(self, dual: Dual, multipliers: Tensor, iterations: Tensor) -> Outcome:
        u = dual.predictor(multipliers)
        z = dual.activation.sigma(u)
        w = dual.activation.slope(u)
        relative = relative_residual(dual, u, z, w, dual.residual(z))
        eps = torch.finfo(u.dtype).eps
        converged = relative <= max(self.threshold, 16 * eps)
        status = torch.where(converged, int(Status.CONVERGED), int(Status.MAX_ITERATIONS))
        return Outcome(multipliers, u, iterations, status)

"""Two ways to minimise D: Newton, and the paper's gradient descent.

A solver takes the problems of a batch and says, for each sample alone, how it ended.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.certificate import certifies
from taut.dual import Dual
from taut.factor import solve_gram, solve_gram_inexactly
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

    def write(self, index: Tensor, multipliers: Tensor, u: Tensor, status: Tensor) -> None:
        """Enter the samples at `index`; a status below 0 is undecided."""
        self.multipliers[index], self.u[index] = multipliers, u
        self.status[index] = status.where(status >= 0, int(Status.MAX_ITERATIONS))


class Solver(ABC):
    """How the multipliers are found; `dtype` is that of the solve, None for that of v."""

    dtype: torch.dtype | None

    @abstractmethod
    def solve(
        self, dual: Dual, rows: Rows, init: Float[Tensor, "N I"], group_size: int, eps: float
    ) -> Outcome:
        """Minimise D for N samples from `init`; every number given is finite.

        `group_size` consecutive samples form a group, for solvers that decide by groups.
        """


def rounding_scale(dual: Dual, u: Tensor, z: Tensor) -> Tensor:
    """The size of what is rounded in A z − b, row by row: |b| + |A|(|z| + σ'(u)(|u| + |v|)).

    The first two are the terms of the sum. The last is what z = σ(u) inherits from the rounding
    of u = v + Aᵀλ; with large logits it is the larger part.
    """
    spread = z.abs() + dual.activation.slope(u) * (u.abs() + dual.v.abs())
    return dual.b.abs() + dual.A.abs().apply(spread)


def relative(residual: Tensor, scale: Tensor) -> Tensor:
    """max_i |A z − b|_i over its scale, for each sample."""
    if residual.shape[-1] == 0:
        return residual.new_zeros(residual.shape[:-1])
    return (residual.abs() / scale.clamp_min(torch.finfo(scale.dtype).tiny)).amax(-1)


@final
@dataclass(frozen=True, eq=False)
class _State:
    """The samples still being worked on; `index` is their place in the batch."""

    index: Int[Tensor, "n"]
    multipliers: Float[Tensor, "n I"]  # of the basis Q = T A
    u: Float[Tensor, "n K"]
    z: Float[Tensor, "n K"]
    residual: Float[Tensor, "n I"]  # A z − b
    relative: Float[Tensor, "n"]  # its size over |b| + |A||z|
    best: Float[Tensor, "n"]  # the smallest of these before

    def rows(self, index: Tensor) -> "_State":
        return _State(*(getattr(self, f.name)[index] for f in fields(self)))

    def merge(self, index: Tensor, other: "_State") -> "_State":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return _State(*(mine.index_copy(0, index, theirs) for mine, theirs in pairs))


@final
@dataclass(frozen=True, eq=False)
class _Problem:
    """D in the coordinates of the basis: u = v + Qᵀλ, ∇ = T(A z − b), ∇² = Q diag(w) Qᵀ."""

    dual: Dual
    rows: Rows
    size_of_b: Tensor

    def state(self, index: Tensor, multipliers: Tensor, best: Tensor) -> _State:
        u = self.dual.v + self.rows.basis.adjoint(multipliers)
        z = self.dual.activation.sigma(u)
        residual = self.dual.residual(z)
        scale = self.size_of_b + self.dual.A.abs().apply(z.abs())
        return _State(index, multipliers, u, z, residual, relative(residual, scale), best)

    def slopes(self, u: Tensor) -> Tensor:
        return self.dual.activation.slope(u)

    def direction(self, w: Tensor, residual: Tensor) -> Tensor:
        """−(Q diag(w) Qᵀ)⁻¹∇D: Newton's where w are the slopes."""
        return -solve_gram(self.rows.basis, w, self.rows.restrict(residual), self.rows.left_out)

    def take(self, index: Tensor) -> "_Problem":
        return _Problem(self.dual.rows(index), self.rows.rows(index), self.size_of_b[index])


@final
@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method with a line search on the slope of D; the default.

    Each sample stops by itself when |A z − b| is within `tol` of |b| + |A||z|; None asks for the
    rounding level of v's dtype. Finished samples cost nothing more.

    The solve runs in float64 whatever the dtype of v: that costs little, and a float32 z is then
    the rounding of the right one. `dtype=None` solves in the dtype of v, for hardware that is slow
    in float64; with large logits a float32 u = v + Aᵀλ is itself too coarse for a small residual.

    A step p is judged by the derivative of D along it, h(α) = pᵀ∇D(λ + αp), which rises from
    −|h(0)|: it is too long when h has become clearly positive. Differences of D itself, as in
    Armijo's rule, drown in rounding long before the residual does.

    >>> import taut
    >>> A, b = torch.ones(1, 3), torch.tensor([2.0])
    >>> taut.project(torch.zeros(3), A, b, activation="sigmoid", solver=Newton(tol=1e-6)).z
    tensor([0.6667, 0.6667, 0.6667])
    """

    tol: float | None = None
    max_iterations: int = 200
    dtype: torch.dtype | None = torch.float64

    # u moves at most this far in the first trial of a line search: σ is another function there.
    _reach = 5.0
    # From so many constraints on, conjugate gradients beat a factorisation for each sample.
    _many_rows = 24
    # The loosest level at which a residual that has stopped falling counts as rounding.
    _floor = 1e-13

    def __post_init__(self) -> None:
        if self.tol is not None and not self.tol > 0:
            raise ValueError(f"tol must be positive or None; got {self.tol!r}.")
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations must be ≥ 0; got {self.max_iterations!r}.")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32, float64 or None; got {self.dtype!r}.")

    def solve(
        self, dual: Dual, rows: Rows, init: Float[Tensor, "N I"], group_size: int, eps: float
    ) -> Outcome:
        problem = _Problem(dual, rows, dual.b.abs())
        state = self._start(problem, init)
        outcome = Outcome(
            torch.zeros_like(init),
            torch.zeros_like(dual.v),
            torch.zeros_like(state.index),
            torch.full_like(state.index, Status.MAX_ITERATIONS),
        )
        for iteration in range(self.max_iterations + 1):
            status, multipliers = self._judge(problem, state, iteration, eps)
            decided = status >= 0
            if bool(decided.any()) or iteration == self.max_iterations:
                decided = decided | (iteration == self.max_iterations)
                done = decided.nonzero().squeeze(-1)
                outcome.write(state.index[done], multipliers[done], state.u[done], status[done])
                outcome.iterations[state.index[done]] = iteration
                left = (~decided).nonzero().squeeze(-1)
                if len(left) == 0:
                    break
                problem, state = problem.take(left), state.rows(left)
            state = self._step(problem, state)
        return outcome

    def _start(self, problem: _Problem, init: Tensor) -> _State:
        index = torch.arange(len(init), device=init.device)
        best = torch.full_like(problem.dual.v[:, 0], torch.inf)
        state = problem.state(index, problem.rows.enter(problem.dual.A, init), best)
        lost = ~(state.residual.abs() <= 1e4 * (1 + problem.size_of_b)).all(-1)
        if bool(lost.any()):
            lost = lost.nonzero().squeeze(-1)
            state = state.merge(lost, self._lower(problem.take(lost), state.rows(lost)))
        return state

    def _lower(self, problem: _Problem, state: _State) -> _State:
        """A better start where exp begins far too high, if there is one.

        Only the part of v in the null space of A matters, so the rest can be taken out; and then
        u can move down as one: v → v − Aᵀ(AAᵀ)⁻¹A(v + s·1), first with s = 0, then s = max u.
        """
        shift, v = torch.zeros_like(state.u[:, :1]), problem.dual.v
        for _ in range(2):
            multipliers = problem.direction(torch.ones_like(v), problem.dual.A.apply(v + shift))
            trial = problem.state(state.index, multipliers, state.best)
            shift = trial.u.amax(-1, keepdim=True)
            size, before = (x.residual.abs().amax(-1).nan_to_num(torch.inf) for x in (trial, state))
            better = (size < before).nonzero().squeeze(-1)
            state = state.merge(better, trial.rows(better))
        return state

    def _judge(
        self, problem: _Problem, state: _State, iteration: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        """A Status for each sample, or −1 where the work goes on; and its multipliers."""
        target = self.tol or max(0.25 * eps, 8 * torch.finfo(state.z.dtype).eps)
        floor = max(target, 16 * eps, self._floor)
        multipliers = problem.rows.leave(state.multipliers)
        converged = state.relative <= target
        if bool(converged.all()):
            return torch.zeros_like(state.index), multipliers
        near = state.relative <= min(1e6 * floor, 1e-2)
        if bool(near.any()):
            # Is what is left the rounding of u, or has it stopped falling?
            scale = rounding_scale(problem.dual, state.u, state.z)
            level = relative(state.residual, scale)
            stalled = (level <= floor) & (state.relative >= 0.5 * state.best)
            converged = converged | (near & ((level <= target) | stalled))
        status = torch.where(converged, int(Status.CONVERGED), -1)
        if problem.rows.projector is not None:
            # The rows kept are satisfied to rounding, and a redundant one is not.
            scale = rounding_scale(problem.dual, state.u, state.z)
            kept = state.residual.masked_fill(problem.rows.left_out, 0)
            solved = ~converged & (relative(kept, scale) <= target)
            alike = relative(state.residual, scale) <= floor
            status = status.where(~(solved & alike), int(Status.CONVERGED))
            status = status.where(~solved | alike, int(Status.INCONSISTENT))
        if iteration > 1:
            proven, proofs = _certificates(problem, multipliers, eps)
            proven = proven & (status < 0)
            status = status.where(~proven, int(Status.INFEASIBLE))
            multipliers = torch.where(proven.unsqueeze(-1), proofs, multipliers)
        return status.where(state.relative.isfinite(), int(Status.NONFINITE)), multipliers

    def _step(self, problem: _Problem, state: _State) -> _State:
        step = self._direction(problem, state)
        best = torch.minimum(state.best, state.relative)
        result = problem.state(state.index, state.multipliers + step, best)
        reach = (result.u - state.u).abs().amax(-1)
        # Most steps are plainly good: near, and with a residual that has fallen by a lot.
        good = (result.relative <= 0.25 * state.relative) & (reach <= self._reach)
        if bool(good.all()):
            return result
        rest = (~good).nonzero().squeeze(-1)
        part, before, step = problem.take(rest), state.rows(rest), step[rest]
        wild = (~(reach[rest] <= 20 * self._reach)).nonzero().squeeze(-1)
        if len(wild):
            tamed = self._damped(part.take(wild), before.rows(wild))
            step = step.index_copy(0, wild, tamed)
        return result.merge(rest, self._search(part, before, step, best[rest]))

    def _direction(self, problem: _Problem, state: _State) -> Tensor:
        w, metric = problem.slopes(state.u), problem.rows.metric
        if metric is None or len(metric) < self._many_rows:
            return problem.direction(w, state.residual)
        # As accurate as the residual is small: what is left after the step is then its square.
        accuracy = (0.3 * state.relative).clamp(1e-8, 1e-2)
        return -solve_gram_inexactly(problem.dual.A, w, state.residual, metric, accuracy)

    def _damped(self, problem: _Problem, state: _State) -> Tensor:
        """The direction where Newton's is hopeless: some combination of rows has saturated.

        Such a combination would run away and hold all others back. Slopes w + μ limit it, with μ
        so that a step against no curvature at all moves u by about 200.
        """
        flat = problem.direction(torch.ones_like(state.u), state.residual)
        mu = problem.rows.basis.adjoint(flat).abs().amax(-1, keepdim=True) / 200
        return problem.direction(problem.slopes(state.u) + mu, state.residual)

    def _search(self, problem: _Problem, state: _State, step: Tensor, best: Tensor) -> _State:
        """The state at λ + αp, with α chosen for each sample from the size and sign of h(α)."""
        steepness = (step * problem.rows.restrict(state.residual)).sum(-1).abs()
        reach = problem.rows.basis.adjoint(step).abs().amax(-1)
        alpha = (self._reach / reach).nan_to_num(0.0).clamp(max=1)
        growing, low = torch.ones_like(alpha, dtype=torch.bool), torch.zeros_like(alpha)
        todo = torch.arange(len(step), device=step.device)
        result = state
        for _ in range(60):
            part, h0, a, floor = problem.take(todo), steepness[todo], alpha[todo], low[todo]
            moved = state.multipliers[todo] + a.unsqueeze(-1) * step[todo]
            trial = part.state(state.index[todo], moved, best[todo])
            result = result.merge(todo, trial)
            h = (step[todo] * part.rows.restrict(trial.residual)).sum(-1)
            long = ~(h <= 0.5 * h0)
            # D still falls at a good part of its first rate: go further. exp needs it, whose
            # Newton step is one unit of u however far there is to go.
            short = (h < -0.3 * h0) & growing[todo]
            cut = (h0 / (h0 + h)).nan_to_num(nan=0.1).clamp(0.1, 0.5)
            further = torch.where(short, 4 * a, a)
            alpha[todo] = torch.where(long, floor + (a - floor) * cut, further)
            low[todo] = torch.where(short, a, floor)
            growing[todo] = short
            todo = todo[long | short]
            if len(todo) == 0:
                break
        return result


def _certificates(problem: _Problem, multipliers: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Which samples are proven infeasible, and by which multipliers."""
    dual = problem.dual
    # As far as λ has run, only its direction counts: bring it to size 1 by a power of 2, and to
    # the precision in which it will be returned.
    size = multipliers.abs().amax(-1, keepdim=True)
    candidate = torch.ldexp(multipliers, -torch.frexp(size.nan_to_num(1.0)).exponent)
    candidate = candidate.to(torch.float32).to(size.dtype) if eps > 1e-10 else candidate
    proven = certifies(candidate, dual.A.adjoint(candidate), dual)
    if not dual.activation.range.bounded:
        # λ = t·d + rest with t → ∞, and in a half-infinite range the rest may spoil the proof
        # that d is: leave out the small entries.
        direction = candidate.where(candidate.abs() > 0.1, 0)
        also = ~proven & certifies(direction, dual.A.adjoint(direction), dual)
        candidate = torch.where(also.unsqueeze(-1), direction, candidate)
        proven = proven | also
    return proven, candidate


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
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations must be ≥ 0; got {self.max_iterations!r}.")
        if not (self.step > 0 and self.min_step > 0 and self.threshold >= 0):
            raise ValueError(
                "GradientDescent needs step > 0, min_step > 0 and threshold ≥ 0; got "
                f"step={self.step!r}, min_step={self.min_step!r}, threshold={self.threshold!r}."
            )

    def solve(
        self, dual: Dual, rows: Rows, init: Float[Tensor, "N I"], group_size: int, eps: float
    ) -> Outcome:
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
        return self._outcome(dual, multipliers, iterations.repeat_interleave(size), eps)

    def _outcome(self, dual: Dual, multipliers: Tensor, iterations: Tensor, eps: float) -> Outcome:
        u = dual.predictor(multipliers)
        z = dual.activation.sigma(u)
        level = relative(dual.residual(z), rounding_scale(dual, u, z))
        converged = level <= max(self.threshold, 16 * eps)
        status = torch.where(converged, int(Status.CONVERGED), int(Status.MAX_ITERATIONS))
        return Outcome(multipliers, u, iterations, status)

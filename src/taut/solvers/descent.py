"""The paper's solver: gradient descent on λ, keyed to the text of its section 4."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from taut.outcome import Outcome, Status
from taut.problems import Linear, Problem
from taut.solvers.base import Solver, Task, enter, leave, relative


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

    def solve(self, problem: Problem) -> Outcome:
        if not isinstance(problem, Linear):
            raise TypeError("GradientDescent solves linear equations only: use taut.Newton.")
        task, start, finite = enter(problem, self.dtype or problem.v.dtype)
        return leave(problem, task, finite, self._descend(task, start, problem.group))

    def _descend(self, task: Task, init: Tensor, group: int) -> tuple[Any, ...]:
        """λ, u, z, iterations and status of every sample."""
        size = max(1, group)
        groups = len(task.v) // size
        place = torch.arange(len(task.v), device=task.v.device).reshape(groups, size)
        multipliers = init.clone()
        iterations = torch.full_like(place[:, 0], self.max_iterations)
        active, part, point = torch.arange(groups, device=place.device), task, init
        running = torch.ones_like(active, dtype=torch.bool)
        alpha = torch.full((groups,), self.step, dtype=init.dtype, device=init.device)
        loss, gradient = _average_and_gradient(part, point, size)
        for iteration in range(1, self.max_iterations + 1):
            if not bool(running.any()):
                break
            trial = torch.addcmul(point, alpha.repeat_interleave(size)[:, None], gradient, value=-1)
            trial_loss, trial_gradient = _average_and_gradient(part, trial, size)
            # Sec. 4: "the step-size parameter set to 0.1 and then halved each time if too high"
            falls = trial_loss < loss
            alpha = torch.where(falls, alpha, 0.5 * alpha)
            # Sec. 4: "a threshold of 5e-3 for the average change in the loss function w.r.t. λ"
            settled = falls & (loss - trial_loss < self.threshold)
            loss = torch.where(falls, trial_loss, loss)
            stays = (~falls).nonzero().squeeze(-1)
            if len(stays):  # few do, after the first iterations: cheaper than to choose everywhere
                for new, old in ((trial, point), (trial_gradient, gradient)):
                    shape = (len(active), size, new.shape[-1])
                    new.reshape(shape)[stays] = old.reshape(shape)[stays]
            point, gradient = trial, trial_gradient
            finished = running & (settled | (alpha < self.min_step))
            if not bool(finished.any()):
                continue
            multipliers[place[active[finished]].flatten()] = point[finished.repeat_interleave(size)]
            iterations[active[finished]] = iteration
            running = running & ~finished
            # Groups that are done are carried along until leaving them out pays for the copy.
            if int(running.sum()) <= 0.75 * len(running):
                kept = running.repeat_interleave(size)
                part = task.take(place[active[running]].flatten())
                point, gradient = point[kept], gradient[kept]
                active, alpha, loss = active[running], alpha[running], loss[running]
                running = running[running]
        still = place[active[running]].flatten()
        multipliers[still] = point[running.repeat_interleave(size)]
        return self._judged(task, multipliers, iterations.repeat_interleave(size))

    def _judged(self, task: Task, multipliers: Tensor, iterations: Tensor) -> tuple[Any, ...]:
        u = task.A.shifted_adjoint(task.v, multipliers)
        z = task.activation.sigma(u)
        level = relative(task.residual(z), task.rounding_scale(u, z))
        converged = level <= max(self.threshold, 16 * task.eps)
        status = torch.where(converged, int(Status.CONVERGED), int(Status.MAX_ITERATIONS))
        return multipliers, u, z, iterations, status


def _average_and_gradient(task: Task, multipliers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The average of D in each group, and ∇D of each sample, from one u."""
    u = task.A.shifted_adjoint(task.v, multipliers)
    phi, linear = task.activation.phi(u), task.b * multipliers
    groups = len(u) // size
    # One long sum over a group is much faster than one over each sample and then over these.
    phi, linear = (x.reshape(groups, size * x.shape[-1]).sum(-1) for x in (phi, linear))
    return (phi - linear) / size, task.residual(task.activation.sigma(u))

"""The paper's solver: gradient descent on λ, keyed to the text of its section 4."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.dual import Dual
from taut.rows import Rows
from taut.solution import Status
from taut.solver import Outcome, Solver, relative, rounding_scale


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
        return Outcome(multipliers, u, z, iterations, status)

"""Speed. A backend may say "converged" of a sample; every other it leaves open."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from taut.outcome import Outcome
from taut.problems import Problem


@final
@dataclass(frozen=True)
class Rules:
    """Every threshold of Newton's method, for the torch code and for backends alike.

    >>> Rules().target(torch.float64) < 1e-14
    True
    """

    tol: float | None = None  # of |A z − b| over |b| + |A||z|; None: the rounding of v's dtype
    max_iterations: int = 200
    dtype: torch.dtype | None = torch.float64  # of the solve; None is that of v
    # Steps. u moves at most `reach` in the first trial of a line search: σ is another function
    # beyond. A direction that moves it by more than `wild` reaches is damped, so that it moves u
    # by about `damped` where there is no curvature at all.
    reach: float = 5.0
    wild: float = 20.0
    damped: float = 200.0
    # A whole step is good where D is nearly level at its end: |h| ≤ level·|h(0)|.
    level: float = 0.4
    # A trial is too long with h > overshoot·|h(0)|, too short with h < −undershoot·|h(0)|: exp
    # takes one unit of u a step however far there is to go. It is cut by a factor between `cut`
    # and 1/2, or grows by `growth` up to `longest` steps.
    overshoot: float = 0.5
    undershoot: float = 0.3
    cut: float = 0.1
    growth: float = 4.0
    longest: float = 16.0
    trials: int = 40
    # Further steps with one factor, while each gains `gain`: they cost a fraction of a new one.
    chords: int = 5
    gain: float = 0.1
    # A start is lost where |A z − b| > lost·(1 + |b|), or where it moves u further than `far`.
    lost: float = 1e4
    far: float = 1e3
    # Stopped at rounding: a residual of some units of rounding that no longer falls by half.
    unit: float = 8.0 * 2.0**-52
    near: float = 1e3  # units within which it is asked of a residual that still falls
    # Cholesky: pivots below this part of their diagonal are rounding.
    pivot: float = 1e-13
    # Inequalities: active rows with a pivot below this part of their diagonal depend on each other;
    # Newton's first attempt takes so many steps.
    dependent: float = 1e-11
    first: int = 12
    # What is left of the optimality conditions may be so much of |side| + |C|(|z| + w|v|), and of
    # that with the rounding of u where it no longer falls. A multiplier that moves u by less than
    # `idle` of its size is 0.
    fair: float = 1e-12
    rough: float = 1e-13
    idle: float = 64 * 2.0**-52

    def target(self, dtype: torch.dtype) -> float:
        """The relative residual that is enough for numbers given in `dtype`."""
        own = torch.finfo(self.dtype or dtype).eps
        return self.tol or max(2 * torch.finfo(dtype).eps, 8 * own)

    def rule(self, dtype: torch.dtype) -> float:
        """What CONVERGED promises: |A z − b| ≤ rule·(|b| + |A||z|), for each equation.

        >>> Rules().rule(torch.float64)
        1e-12
        """
        if (self.dtype or dtype) != torch.float64:  # float32 also solves
            return max(self.tol or 0.0, 16 * torch.finfo(torch.float32).eps)
        return max(self.tol or 0.0, 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps)

    def cap(self, dtype: torch.dtype) -> float:
        """The rule for z in the dtype of the solve: less what rounding it, and measuring, take."""
        return self.rule(dtype) - max(1e-13, torch.finfo(dtype).eps)

    def share(self, dtype: torch.dtype) -> float:
        """How much of |A||z| counts in the size of a residual.

        Less where the target is coarse: a z far too large, on its way down, would pass as soon as
        its terms happen to cancel to that accuracy.
        """
        return 1.0 if self.target(dtype) < 1e-12 else 0.01


@runtime_checkable
class Backend(Protocol):
    """The contract. A backend may leave any sample open, and may give no verdict but CONVERGED."""

    def attempt(self, problem: Problem, rules: Rules) -> Outcome:
        """Solve what is easy; the rest has status −1."""
        ...

    def pullback(
        self, u: Tensor, status: Tensor, grads: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, int] | None:
        """∂v and ∂b from the gradients of z, λ and u, and how many samples are open.

        Those have NaN in ∂b. None says that all are open.
        """
        ...

    def loss(
        self, v: Tensor, b: Tensor, y: Tensor, u: Tensor, multipliers: Tensor
    ) -> Float[Tensor, "N"] | None:
        """Σψ(y) − yᵀv + D(λ) of each sample, less what is of held outputs, or None."""
        ...


@final
class Torch:
    """Leaves everything to the mathematics in torch."""

    def attempt(self, problem: Problem, rules: Rules) -> Outcome:
        return Outcome.open(problem.inputs[0], problem.units)

    def pullback(self, u: Tensor, status: Tensor, grads: Sequence[Tensor | None]) -> None:
        return None

    def pull_within(self, problem: Problem, *found: Any) -> None:
        """The same for inequalities; None says that all are open."""
        return None

    def loss(self, v: Tensor, b: Tensor, y: Tensor, u: Tensor, multipliers: Tensor) -> None:
        return None

"""What every solver shares: its interface, what it returns, and how a residual is measured."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.dual import Dual
from taut.rows import Rows


@final
class Outcome(NamedTuple):
    """What a solver found: λ, u = v + Aᵀλ, z = σ(u), and the verdict on each sample."""

    multipliers: Float[Tensor, "N I"]
    u: Float[Tensor, "N K"]
    z: Float[Tensor, "N K"]
    iterations: Int[Tensor, "N"]
    status: Int[Tensor, "N"]

    @staticmethod
    def like(dual: Dual, init: Tensor) -> "Outcome":
        """Room for the outcome of these problems."""
        count = torch.zeros(len(init), dtype=torch.long, device=init.device)
        u = torch.zeros_like(dual.v)
        return Outcome(torch.zeros_like(init), u, u.clone(), count, count.clone())

    def write(self, index: Tensor, part: "Outcome") -> None:
        """Enter the samples at `index`."""
        for mine, theirs in zip(self, part, strict=True):
            mine.index_copy_(0, index, theirs)

    def rows(self, index: Tensor) -> "Outcome":
        """The samples at `index`."""
        return Outcome(*(x.index_select(0, index) for x in self))


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
    # Not 0/0; and a scale that has overflowed must not make every residual small.
    limits = torch.finfo(scale.dtype)
    return residual.abs().div_(scale.clamp(limits.tiny, 1e-8 * limits.max)).amax(-1)

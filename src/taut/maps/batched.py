"""A dense matrix for each sample."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.autograd import lead
from taut.maps.base import LinearMap


@final
@dataclass(frozen=True, eq=False)
class BatchedMap(LinearMap):
    """A dense matrix for each sample.

    >>> A = BatchedMap(torch.ones(4, 2, 3))
    >>> A.apply(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    data: Float[Tensor, "*batch I K"]

    @property
    def shared(self) -> bool:
        return False

    def over(self, data: Float[Tensor, "*batch I K"]) -> "BatchedMap":
        return BatchedMap(data)

    def apply(self, z: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I"]:
        return (self.data @ z.unsqueeze(-1)).squeeze(-1)

    def adjoint(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch K"]:
        return (self.data.mT @ multipliers.unsqueeze(-1)).squeeze(-1)

    def gram(self, w: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I I"]:
        return (self.data * w.unsqueeze(-2)) @ self.data.mT

    def outer(self, left: Float[Tensor, "*batch I"], right: Float[Tensor, "*batch K"]) -> Tensor:
        return left.unsqueeze(-1) * right.unsqueeze(-2)

    def abs(self) -> "BatchedMap":
        return BatchedMap(self.data.abs())

    def only(self, rows: Int[Tensor, "m"]) -> "BatchedMap":
        return BatchedMap(self.data[..., rows, :])

    def largest(self) -> Float[Tensor, "*batch I"]:
        return torch.linalg.vector_norm(self.data, torch.inf, dim=-1)

    def highest(self, u: Float[Tensor, "n K"]) -> Float[Tensor, "n I"]:
        return u.unsqueeze(-2).masked_fill(self.data == 0, -torch.inf).amax(-1)

    def joined(self, data: Tensor, dim: int | None, size: int, n: int) -> "BatchedMap":
        return BatchedMap(lead(data, dim, size).flatten(0, 1))

    def take(self, index: Tensor) -> "BatchedMap":
        return BatchedMap(self.data[index])

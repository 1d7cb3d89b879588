"""The map A: apply (A z), adjoint (Aᵀλ) and gram (A diag(s) Aᵀ).

One class for each way to hold A: one dense matrix for all samples, or one for each sample.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.pairs import Pairs

_TABLE_LIMIT = 2**22  # entries of the table of row products; beyond it, blocks of samples
_BLOCK_LIMIT = 2**24
# From this size on, an A of which so small a part of all pairs is not zero is not treated as full.
_SMALL, _FEW = 2**12, 64


class LinearMap(ABC):
    """A as an operator on batches; `data` is the tensor that carries its gradient."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(I, K)."""
        return self.data.shape[-2], self.data.shape[-1]

    @abstractmethod
    def apply(self, z: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I"]:
        """A z."""

    @abstractmethod
    def adjoint(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch K"]:
        """Aᵀλ."""

    def shifted_adjoint(
        self, v: Float[Tensor, "*batch K"], multipliers: Float[Tensor, "*batch I"]
    ) -> Float[Tensor, "*batch K"]:
        """v + Aᵀλ."""
        return v + self.adjoint(multipliers)

    def excess(
        self, z: Float[Tensor, "*batch K"], b: Float[Tensor, "*batch I"]
    ) -> Float[Tensor, "*batch I"]:
        """A z − b."""
        return self.apply(z) - b

    @abstractmethod
    def gram(self, s: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I I"]:
        """A diag(s) Aᵀ."""

    @abstractmethod
    def outer(self, left: Float[Tensor, "*batch I"], right: Float[Tensor, "*batch K"]) -> Tensor:
        """left rightᵀ in the shape of `data`, summed over samples that share A: its gradient."""

    @abstractmethod
    def abs(self) -> "LinearMap":
        """|A|, entry by entry: the scale of rounding in A z."""

    @abstractmethod
    def rows(self, index: Tensor) -> "LinearMap":
        """The map of the samples at `index`."""


def _multiply(x: Tensor, matrix: Tensor, onto: Tensor | None = None, beta: float = 1.0) -> Tensor:
    """x @ matrix + beta·onto over the last dimension."""
    if onto is None:
        return x @ matrix
    if x.ndim == 2:
        return torch.addmm(onto, x, matrix, beta=beta)
    return x @ matrix + beta * onto


@final
@dataclass(frozen=True, eq=False)
class DenseMap(LinearMap):
    """One dense (I, K) matrix for all samples.

    >>> A = DenseMap(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
    >>> A.apply(torch.tensor([1.0, 2.0, 3.0]))
    tensor([3., 5.])
    """

    data: Float[Tensor, "I K"]

    def apply(self, z: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I"]:
        return _multiply(z, self.data.mT)

    def adjoint(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch K"]:
        return _multiply(multipliers, self.data)

    def shifted_adjoint(
        self, v: Float[Tensor, "*batch K"], multipliers: Float[Tensor, "*batch I"]
    ) -> Float[Tensor, "*batch K"]:
        return _multiply(multipliers, self.data, onto=v)

    def excess(
        self, z: Float[Tensor, "*batch K"], b: Float[Tensor, "*batch I"]
    ) -> Float[Tensor, "*batch I"]:
        return _multiply(z, self.data.mT, onto=b, beta=-1.0)

    def gram(self, s: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I I"]:
        rows, columns = self.data.shape
        if self._pairs is not None:
            pairs, values = self._pairs
            return pairs.gram(values, s)
        if rows * rows * columns <= _TABLE_LIMIT:
            return _multiply(s, self._products).reshape(*s.shape[:-1], rows, rows)
        flat = s.reshape(s.shape[:-1].numel(), columns)
        blocks = flat.split(max(1, _BLOCK_LIMIT // (rows * columns)))
        grams = [(self.data * block.unsqueeze(-2)) @ self.data.mT for block in blocks]
        return torch.cat(grams).reshape(*s.shape[:-1], rows, rows)

    @cached_property
    def _pairs(self) -> tuple[Pairs, Tensor] | None:
        """The pairs of non-zeros in a column, where they are few."""
        rows, columns = self.data.shape
        if rows * columns < _SMALL or self.data.requires_grad:
            return None
        counts = torch.count_nonzero(self.data, dim=0)
        if int(counts.square().sum()) * _FEW > rows * rows * columns:
            return None
        row, column = self.data.nonzero(as_tuple=True)
        return Pairs.of(row, column, (rows, columns)), self.data[row, column]

    @cached_property
    def _products(self) -> Tensor:
        # a_i·a_j for every pair of rows: all Hessians of a batch are then one matrix product.
        rows, columns = self.data.shape
        return (self.data.unsqueeze(0) * self.data.unsqueeze(1)).reshape(rows**2, columns).mT

    def outer(self, left: Float[Tensor, "*batch I"], right: Float[Tensor, "*batch K"]) -> Tensor:
        n = left.shape[:-1].numel()
        return left.reshape(n, left.shape[-1]).mT @ right.reshape(n, right.shape[-1])

    def abs(self) -> "DenseMap":
        return self._absolute

    @cached_property
    def _absolute(self) -> "DenseMap":
        return DenseMap(self.data.abs())

    def rows(self, index: Tensor) -> "DenseMap":
        return self


@final
@dataclass(frozen=True, eq=False)
class BatchedMap(LinearMap):
    """A dense matrix for each sample: (*batch, I, K).

    >>> A = BatchedMap(torch.ones(4, 2, 3))
    >>> A.apply(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    data: Float[Tensor, "*batch I K"]

    def apply(self, z: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I"]:
        return (self.data @ z.unsqueeze(-1)).squeeze(-1)

    def adjoint(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch K"]:
        return (self.data.mT @ multipliers.unsqueeze(-1)).squeeze(-1)

    def gram(self, s: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I I"]:
        return (self.data * s.unsqueeze(-2)) @ self.data.mT

    def outer(self, left: Float[Tensor, "*batch I"], right: Float[Tensor, "*batch K"]) -> Tensor:
        return left.unsqueeze(-1) * right.unsqueeze(-2)

    def abs(self) -> "BatchedMap":
        return BatchedMap(self.data.abs())

    def rows(self, index: Tensor) -> "BatchedMap":
        return BatchedMap(self.data[index])


def dense_map(A: Float[Tensor, "*batch I K"]) -> LinearMap:
    """The map of a dense A: shared where it has two dimensions, else one for each sample."""
    return DenseMap(A) if A.ndim == 2 else BatchedMap(A)

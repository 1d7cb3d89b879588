"""One dense matrix for all samples."""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.maps.base import LinearMap
from taut.maps.batched import BatchedMap
from taut.maps.pairs import Pairs

_TABLE_LIMIT = 2**22  # entries of the table of row products; beyond it, blocks of samples
_BLOCK_LIMIT = 2**24
# From this size on, an A of which so small a part of all pairs is not zero is not treated as full.
_SMALL, _FEW = 2**12, 64


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

    def over(self, data: Float[Tensor, "I K"]) -> "DenseMap":
        return DenseMap(data)

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

    def gram(self, w: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I I"]:
        rows, columns = self.data.shape
        if self._pairs is not None:
            pairs, values = self._pairs
            return pairs.gram(values, w)
        if rows * rows * columns <= _TABLE_LIMIT:
            return _multiply(w, self._products).reshape(*w.shape[:-1], rows, rows)
        flat = w.reshape(w.shape[:-1].numel(), columns)
        blocks = flat.split(max(1, _BLOCK_LIMIT // (rows * columns)))
        grams = [(self.data * block.unsqueeze(-2)) @ self.data.mT for block in blocks]
        return torch.cat(grams).reshape(*w.shape[:-1], rows, rows)

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

    def only(self, rows: Int[Tensor, "m"]) -> "DenseMap":
        return DenseMap(self.data[rows])

    def largest(self) -> Float[Tensor, "I"]:
        return self._largest

    @cached_property
    def _largest(self) -> Tensor:
        return self._absolute.data.amax(-1)

    def highest(self, u: Float[Tensor, "n K"]) -> Float[Tensor, "n I"]:
        absent = self.data == 0
        return torch.stack([u.masked_fill(a, -torch.inf).amax(-1) for a in absent.unbind()], -1)

    def joined(self, data: Tensor, dim: int | None, size: int, n: int) -> LinearMap:
        if dim is None:
            return DenseMap(data)
        each = data.movedim(dim, 0).unsqueeze(1).expand(-1, n, -1, -1)
        return BatchedMap(each.flatten(0, 1))

    def take(self, index: Tensor) -> "DenseMap":
        return self

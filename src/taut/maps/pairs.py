"""A diag(w) Aᵀ from the pairs of non-zeros in each column: what it costs when A is mostly zeros."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

_LIMIT = 2**25  # numbers gathered at a time


@final
@dataclass(frozen=True, eq=False)
class Pairs:
    """For every two non-zeros in one column of an (I, K) matrix: their places, and the column."""

    left: Int[Tensor, "pairs"]
    right: Int[Tensor, "pairs"]
    column: Int[Tensor, "pairs"]
    entry: Int[Tensor, "pairs"]  # of the I×I result that they add to
    rows: int

    @staticmethod
    def of(
        rows: Int[Tensor, "nnz"], columns: Int[Tensor, "nnz"], shape: tuple[int, int]
    ) -> "Pairs":
        """All pairs of the non-zeros at (rows, columns)."""
        order = torch.argsort(columns, stable=True)
        counts = torch.bincount(columns, minlength=shape[1])
        first = torch.cumsum(counts, 0) - counts
        size = counts.square()
        column = torch.repeat_interleave(torch.arange(len(counts), device=size.device), size)
        within = torch.arange(len(column), device=size.device) - (size.cumsum(0) - size)[column]
        left = order[first[column] + within // counts[column].clamp_min(1)]
        right = order[first[column] + within % counts[column].clamp_min(1)]
        return Pairs(left, right, column, rows[left] * shape[0] + rows[right], shape[0])

    def gram(
        self, values: Float[Tensor, "nnz"], w: Float[Tensor, "*batch K"]
    ) -> Float[Tensor, "*batch I I"]:
        """A diag(w) Aᵀ of each sample, A with these non-zeros."""
        flat = w.reshape(w.shape[:-1].numel(), w.shape[-1])
        weight = (values[self.left] * values[self.right]).unsqueeze(-1)
        parts = []
        # Samples last: then every gather and every sum is over neighbours in memory.
        for block in flat.mT.split(max(1, _LIMIT // max(1, len(self.column))), dim=1):
            terms = block.contiguous().index_select(0, self.column).mul_(weight)
            total = w.new_zeros(self.rows * self.rows, block.shape[1])
            parts.append(total.index_add_(0, self.entry, terms).mT)
        return torch.cat(parts).reshape(*w.shape[:-1], self.rows, self.rows)

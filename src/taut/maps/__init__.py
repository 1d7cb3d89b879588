"""Ways to hold a matrix. `as_map` is the only place that asks which."""

import torch
from torch import Tensor

from taut.maps.base import LinearMap as LinearMap
from taut.maps.batched import BatchedMap as BatchedMap
from taut.maps.dense import DenseMap as DenseMap
from taut.maps.sparse import Pattern as Pattern, SparseMap as SparseMap, sparse_map as sparse_map


def as_map(A: Tensor) -> LinearMap:
    """The map of A: (I, K) shared, (…, I, K) one for each sample, or a torch sparse matrix.

    >>> as_map(torch.ones(2, 3)).apply(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """
    if A.layout != torch.strided:
        return sparse_map(A)
    return DenseMap(A) if A.ndim == 2 else BatchedMap(A)


def stacked(A: Tensor, G: Tensor | None) -> LinearMap:
    """The map of [A; G], flat: one for each sample, if one of them is; sparse, if one of them is.

    >>> stacked(torch.ones(2, 3), torch.ones(4, 1, 3)).data.shape
    torch.Size([4, 3, 3])
    """
    A = A if A.ndim < 4 else A.flatten(0, -3)
    if G is None:
        return as_map(A)
    G = G if G.ndim < 4 else G.flatten(0, -3)
    if A.layout is G.layout is torch.strided:
        if A.ndim == G.ndim == 2:
            return DenseMap(torch.cat([A, G]))
        n = A.shape[0] if A.ndim == 3 else G.shape[0]
        return BatchedMap(torch.cat([x.expand(n, *x.shape[-2:]) for x in (A, G)], -2))
    if not len(A):
        return as_map(G)
    top, bottom = sparse_map(A), sparse_map(G)
    first, second = top.pattern, bottom.pattern
    rows = torch.cat([first.rows, second.rows + first.shape[0]])
    columns = torch.cat([first.columns, second.columns])
    shape = (first.shape[0] + second.shape[0], first.shape[1])
    return SparseMap(torch.cat([top.data, bottom.data]), Pattern(rows, columns, shape))

"""Ways to hold a matrix. `as_map` is the only place that asks which."""

import torch
from torch import Tensor

from taut.maps.base import LinearMap as LinearMap
from taut.maps.batched import BatchedMap as BatchedMap
from taut.maps.dense import DenseMap as DenseMap
from taut.maps.sparse import SparseMap as SparseMap, sparse_map as sparse_map


def as_map(A: Tensor) -> LinearMap:
    """The map of A: (I, K) shared, (…, I, K) one for each sample, or a torch sparse matrix.

    >>> as_map(torch.ones(2, 3)).apply(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """
    if A.layout != torch.strided:
        return sparse_map(A)
    return DenseMap(A) if A.ndim == 2 else BatchedMap(A)

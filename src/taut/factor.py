"""Newton's linear system (A diag(w) Aᵀ) s = r, solved for each sample alone."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.linear import LinearMap


def solve_gram(
    A: LinearMap,
    w: Float[Tensor, "N K"],
    rhs: Float[Tensor, "N I"],
    left_out: Bool[Tensor, "*n I"],
) -> Float[Tensor, "N I"]:
    """s with A diag(w) Aᵀ s = rhs; rows in `left_out` get s = 0.

    The matrix is scaled to a unit diagonal first: what is left of its condition number then has
    nothing to do with the size of A's rows or of w. Where it is singular to rounding, the
    smallest multiple of the identity that makes it positive definite is added.

    >>> from taut.linear import DenseMap
    >>> A, w = DenseMap(torch.ones(1, 4)), torch.ones(1, 4)
    >>> solve_gram(A, w, torch.tensor([[4.0]]), torch.tensor([False]))
    tensor([[1.]])
    """
    tiny = torch.finfo(w.dtype).tiny
    # Slopes that have underflowed would make the matrix zero; the floor keeps a direction in it.
    gram = A.gram(w.clamp_min(tiny**0.5))
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    out = left_out | ~(diagonal > tiny)
    scale = torch.where(out, torch.zeros_like(diagonal), diagonal.clamp_min(tiny).rsqrt())
    unit = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    unit.diagonal(dim1=-2, dim2=-1).fill_(1)
    factor, info = torch.linalg.cholesky_ex(unit)
    jitter = 8 * torch.finfo(w.dtype).eps
    while bool((info > 0).any()):
        bad = (info > 0).nonzero().squeeze(-1)
        lifted = unit[bad]
        lifted.diagonal(dim1=-2, dim2=-1).add_(jitter)
        again, code = torch.linalg.cholesky_ex(lifted)
        factor, info = factor.index_copy(0, bad, again), info.index_copy(0, bad, code)
        jitter *= 100
    return scale * torch.cholesky_solve((scale * rhs).unsqueeze(-1), factor).squeeze(-1)

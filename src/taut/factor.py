"""Newton's linear system (A diag(w) Aᵀ) s = r, solved for each sample alone."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.linear import LinearMap
from taut.sparse import SparseMap


def solve_gram(
    A: LinearMap,
    w: Float[Tensor, "N K"],
    rhs: Float[Tensor, "N I"],
    left_out: Bool[Tensor, "*n I"],
) -> Float[Tensor, "N I"]:
    """s with A diag(w) Aᵀ s = rhs; rows in `left_out` get s = 0.

    Cholesky's factorisation does not mind rows of very different size. Where the matrix is
    singular to rounding, the least multiple of its diagonal that mends it is added.

    >>> from taut.linear import DenseMap
    >>> A, w = DenseMap(torch.ones(1, 4)), torch.ones(1, 4)
    >>> solve_gram(A, w, torch.tensor([[4.0]]), torch.tensor([False]))
    tensor([[1.]])
    """
    # Slopes that have underflowed would make the matrix zero; the floor keeps a direction in it.
    w = w.clamp_min(torch.finfo(w.dtype).tiny ** 0.5)
    if isinstance(A, SparseMap) and A.iterative:
        return conjugate_gradient(A, w, rhs)
    gram = A.gram(w)
    out = left_out if bool(left_out.any()) else None
    if out is not None:
        gram = gram.masked_fill(out.unsqueeze(-1) | out.unsqueeze(-2), 0)
        gram = gram + torch.diag_embed(out.to(gram.dtype))
        rhs = rhs.masked_fill(out, 0)
    if gram.shape[-1] == 1:
        return rhs / gram.squeeze(-1)
    factor, info = torch.linalg.cholesky_ex(gram)
    solution = torch.cholesky_solve(rhs.unsqueeze(-1), factor).squeeze(-1)
    if bool((info > 0).any()):
        bad = (info > 0).nonzero().squeeze(-1)
        solution = solution.index_copy(0, bad, _solve_singular(gram[bad], rhs[bad]))
    return solution


def _solve_singular(gram: Tensor, rhs: Tensor) -> Tensor:
    """Scale to a unit diagonal, and add the least that makes the matrix positive definite."""
    scale = gram.diagonal(dim1=-2, dim2=-1).rsqrt().nan_to_num(0.0, 0.0, 0.0)
    unit = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    lift = 8 * torch.finfo(gram.dtype).eps
    factor, info = unit, torch.ones(len(unit), dtype=torch.int32, device=gram.device)
    while bool((info > 0).any()):
        bad = (info > 0).nonzero().squeeze(-1)
        lifted = unit[bad]
        lifted.diagonal(dim1=-2, dim2=-1).fill_(1 + lift)
        again, code = torch.linalg.cholesky_ex(lifted)
        factor, info = factor.index_copy(0, bad, again), info.index_copy(0, bad, code)
        lift *= 100
    return scale * torch.cholesky_solve((scale * rhs).unsqueeze(-1), factor).squeeze(-1)


def conjugate_gradient(
    A: SparseMap, w: Float[Tensor, "N K"], rhs: Float[Tensor, "N I"]
) -> Float[Tensor, "N I"]:
    """s with A diag(w) Aᵀ s = rhs to rounding, the matrix only applied, never formed.

    Preconditioned by its diagonal. A sample that is done stands still.

    >>> from taut.sparse import sparse_map
    >>> A = sparse_map(torch.eye(2).to_sparse())
    >>> conjugate_gradient(A, torch.tensor([[2.0, 4.0]]), torch.tensor([[2.0, 2.0]]))
    tensor([[1.0000, 0.5000]])
    """
    diagonal = A.gram_diagonal(w)
    inverse = torch.where(diagonal > 0, diagonal.reciprocal(), torch.zeros_like(diagonal))
    solution = torch.zeros_like(rhs)
    rest, step = rhs, inverse * rhs
    energy = (rest * step).sum(-1, keepdim=True)
    goal = energy * torch.finfo(w.dtype).eps ** 2
    for _ in range(10 * rhs.shape[-1]):
        open_ = energy > goal
        if not bool(open_.any()):
            break
        image = A.apply(w * A.adjoint(step))
        length = torch.where(open_, energy / (step * image).sum(-1, keepdim=True), 0)
        solution = solution + length * step
        rest = rest - length * image
        scaled = inverse * rest
        previous, energy = energy, (rest * scaled).sum(-1, keepdim=True)
        step = torch.where(open_, scaled + (energy / previous) * step, step)
    return solution

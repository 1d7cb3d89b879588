"""Which equations of a sparse A are independent: seen from A Aᵀ, and checked by A itself."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.analysis.basis import Basis, Plain, Reduced, Scaled
from taut.analysis.examine import scale_of, unexamined, warn_of
from taut.maps import LinearMap

# A pivot of A Aᵀ, of rows of length 1, is the square of the distance to the rows before. So small
# it may be 0, and the equation redundant; it is, if no more than rounding is left of it.
_SHORT, _NOTHING = 1e-9, 1e-12
# What is added to the diagonal: more than its rounding, and far less than a short pivot.
_LIFT = 1e-13


def sift(A: LinearMap, precision: float, aloud: bool = True) -> Basis:
    """Look at a sparse A, if A Aᵀ can be formed; else only at the size of its rows.

    `precision` is that in which its numbers were given.

    >>> from taut.maps import as_map
    >>> A = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.float64)
    >>> int(sift(as_map(A.to_sparse()), 1e-16).left_out.sum())
    1
    """
    scale = scale_of(A.largest())
    scaled = A if scale is None else A.scaled(scale)
    basis = unexamined(scaled) if A.iterative or not A.shape[0] else _sifted(scaled)
    if aloud:
        warn_of(basis.condition.nan_to_num(0.0), precision)
    return basis if scale is None else Scaled(basis, scale)


def _sifted(A: LinearMap) -> Basis:
    ones = A.data.new_ones(1, A.shape[1])
    norms = A.gram_diagonal(ones)[0].sqrt()
    norms = norms.where(norms > 0, 1)
    gram = A.gram(ones)[0] / norms / norms.unsqueeze(-1)
    lifted = gram + _LIFT * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(lifted)
    pivots = factor.diagonal().square()
    if bool(info.any()) or not bool(pivots.isfinite().all()):
        return unexamined(A)
    kept = pivots > _SHORT
    condition = pivots.where(kept, 1.0).min().rsqrt()
    if bool(kept.all()):
        return Plain(A, condition)
    fold = _folds(A, gram, norms, kept)
    if fold is None:
        return unexamined(A)  # nearly dependent equations: there is no saying which
    null = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)[~kept] - fold[~kept]
    q, r = torch.linalg.qr(null.mT)
    dual = torch.linalg.solve_triangular(r, q.mT, upper=True)
    return Reduced(A, condition, ~kept, fold, null, dual)


def _folds(
    A: LinearMap, gram: Tensor, norms: Float[Tensor, "I"], kept: Bool[Tensor, "I"]
) -> Float[Tensor, "I I"] | None:
    """Each equation as a combination of those kept; None where one of them is none."""
    factor, info = torch.linalg.cholesky_ex(gram[kept][:, kept])
    if bool(info.any()):
        return None
    index, base = (~kept).nonzero().squeeze(-1), kept.nonzero().squeeze(-1)
    parts = torch.zeros_like(gram[index])
    parts[:, base] = torch.cholesky_solve(gram[base][:, index], factor).mT
    for _ in range(2):  # for what rounding left, by the rows themselves
        signed = -parts
        signed[torch.arange(len(index), device=index.device), index] = 1
        rest = A.adjoint(signed / norms)
        more = (A.apply(rest) / norms)[:, base]
        parts[:, base] += torch.cholesky_solve(more.mT, factor).mT
    parts = torch.where(parts.abs() > _NOTHING, parts, 0)
    signed = -parts
    signed[torch.arange(len(index), device=index.device), index] = 1
    rest = A.adjoint(signed / norms).norm(dim=-1)
    if bool((rest > _NOTHING * (1 + parts.abs().sum(-1))).any()):
        return None
    fold = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    fold[index] = parts * norms[index].unsqueeze(-1) / norms
    return fold

"""Look at a dense A: which of its equations others imply, and how far apart the rest are."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.analysis.basis import Basis, Orthonormal, Plain, Reduced, Scaled
from taut.maps import LinearMap, as_map
from taut.outcome import warn

# Nearer than this to the span of the others, an equation makes multipliers so large that the
# rounding of Aᵀλ shows in the residual.
_DISTINCT = 1e-3
# Nearer than this it may be redundant, which is then looked at more closely.
_NEAR = 1e-9
# A row whose largest entry is beyond 2^±this is scaled: squares, and slopes, must have room.
_SQUARED = 64


@final
class ConditionWarning(UserWarning):
    """A tiny residual no longer pins down the solution.

    >>> issubclass(ConditionWarning, UserWarning)
    True
    """


def unexamined(A: LinearMap) -> Plain:
    """The equations as they are, where looking at them would mean making A dense."""
    shape = () if A.shared else A.data.shape[:-2]
    return Plain(A, A.data.new_full(shape, torch.nan))


def analyse(A: Float[Tensor, "*n I K"], precision: float, aloud: bool = True) -> Basis:
    """Look at a dense A, (I, K) or (N, I, K), which must be finite.

    Equations are redundant if they are so to the rounding of A's dtype, in which the solve runs.
    `precision` is that in which the numbers were given: alike to that, they are kept, with a
    warning.

    >>> type(analyse(torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64), 1e-16)).__name__
    'Reduced'
    """
    scale = scale_of(A.abs().amax(-1) if A.shape[-1] else A.sum(-1))
    if scale is None:
        return _analyse(A, precision, aloud)
    return Scaled(_analyse(scale.unsqueeze(-1) * A, precision, aloud), scale)


def scale_of(largest: Float[Tensor, "*n I"]) -> Float[Tensor, "*n I"] | None:
    """Powers of 2 that bring rows with these entries to a size near 1; None where they have it."""
    exponent = torch.frexp(largest).exponent
    if not bool((exponent.abs() > _SQUARED).any()):
        return None
    # One scale for all rows where they allow it: the smallest multipliers are then the smallest.
    top = exponent.amax(-1, keepdim=True)
    alike = (((top - exponent) <= _SQUARED) | (largest == 0)).all(-1, keepdim=True)
    exponent = torch.where(alike, top, exponent)
    return torch.ldexp(torch.ones_like(largest), -exponent.clamp(-1000, 1000))


def _analyse(A: Float[Tensor, "*n I K"], precision: float, aloud: bool) -> Basis:
    norms = A.norm(dim=-1, keepdim=True)
    unit = A / norms.where(norms > 0, 1)
    factor, info = torch.linalg.cholesky_ex(unit @ unit.mT)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    # A pivot is the distance of a unit row to the span of those before it.
    if bool(((info == 0) & (pivots > _DISTINCT).all(-1)).all()):
        smallest = pivots.amin(-1) if pivots.shape[-1] else A.new_ones(A.shape[:-2])
        return Plain(as_map(A), smallest.reciprocal())
    basis = _reduced(A, unit, norms) if A.ndim == 2 else None
    basis = basis or _examined(A, unit, norms)
    if aloud:
        warn_of(basis.condition, precision)
    return basis


def warn_of(condition: Float[Tensor, "*n"], precision: float) -> None:
    """Say that A is ill-conditioned for numbers given to `precision`, if it is."""
    worst = condition.max().item()
    if worst * precision**0.5 > 1:
        warn(
            f"A is ill-conditioned: its rows, scaled to length 1, have condition number about "
            f"{worst:.0e}. A z = b pins z down to {worst * precision:.0e} of its size only, and "
            "the multipliers hardly at all; solution.condition has the estimate for each sample. "
            "Use float64, or equations that are less alike.",
            ConditionWarning,
        )


def _reduced(A: Tensor, unit: Tensor, norms: Tensor) -> Reduced | None:
    """A well-conditioned A with some redundant equations, by LAPACK; None where it is not one.

    In unitᵀ = Q R the diagonal of R holds the distance of each row to the span of those before
    it, with the rounding of a long sum. So rows that come near are left out first, and then
    compared with the combination of the others that they are nearest to.
    """
    rounding = 8 * torch.finfo(A.dtype).eps
    level = max(_NEAR, rounding * A.shape[1] ** 0.5)
    kept = torch.ones(len(A), dtype=torch.bool, device=A.device)
    while True:
        Q, R = torch.linalg.qr(unit[kept].mT)
        distance = unit.new_zeros(int(kept.sum()))
        distance[: len(R)] = R.diagonal().abs()
        if bool((distance > level).all()):
            break
        kept[kept.nonzero().squeeze(-1)[distance <= level]] = False
    if len(distance) == 0 or bool(kept.all()) or distance.min() <= _DISTINCT:
        return None
    base, rest = unit[kept], unit[~kept]
    parts = base.new_zeros(len(rest), len(base))
    for _ in range(2):  # the second time for what rounding left
        more = torch.linalg.solve_triangular(R, (rest @ Q).mT, upper=True).mT
        rest, parts = rest - more @ base, parts + more
    own = rounding * (1 + parts.abs() @ base.abs()).norm(dim=-1)
    if bool((rest.norm(dim=-1) > own.clamp_min(rounding * A.shape[1] ** 0.5)).any()):
        return None
    fold = torch.eye(len(A), dtype=A.dtype, device=A.device)
    size = norms.where(norms > 0, 1).squeeze(-1)
    fold[~kept] = 0
    fold[(~kept).nonzero(), kept.nonzero().squeeze(-1)] = norms[~kept] * parts / size[kept]
    return _fold(A, kept, fold, distance.min().reciprocal())


def _fold(A: Tensor, kept: Tensor, fold: Tensor, condition: Tensor) -> Reduced:
    return Reduced(as_map(A), condition, ~kept, fold, *_null(fold, kept))


def _examined(A: Tensor, unit: Tensor, norms: Tensor) -> Basis:
    *batch, rows, columns = A.shape
    count = A.shape[:-2].numel()
    # The rows in the coordinates of an orthonormal basis of their span: I numbers each, not K.
    flat = unit.reshape(count, rows, columns)
    coordinates = torch.linalg.qr(flat.mT, mode="r").R.mT if columns > rows else flat
    level = 8 * torch.finfo(A.dtype).eps * columns**0.5
    basis, distance = _orthogonalise(coordinates, level)
    kept = distance > 0
    smallest = distance.where(kept, 1.0).amin(-1)
    # unit = L Q' with Q' the orthonormal rows just found; T = L⁻¹ for the rows kept.
    transform = _transform(coordinates, basis, kept).reshape(*batch, rows, rows)
    kept, smallest = kept.reshape(*batch, rows), smallest.reshape(batch)
    transform = transform / norms.where(norms > 0, 1).mT
    orthonormal = transform @ A  # computed from T, so that the two agree to rounding
    identity = torch.eye(rows, dtype=A.dtype, device=A.device).expand(*batch, rows, rows)
    fold = torch.where(kept.unsqueeze(-1), identity, (A @ orthonormal.mT) @ transform)
    # Once more for what rounding left: T is large where equations are nearly redundant.
    fold = fold + ((A - fold @ A) @ orthonormal.mT) @ transform
    good = smallest > _DISTINCT
    condition = smallest.reciprocal()
    if bool((good & kept.all(-1)).all()):
        return Plain(as_map(A), condition)
    reduced = _fold(A, kept, fold, condition)
    if bool(good.all()):
        return reduced
    # A good sample keeps its own rows.
    own = good[..., None, None]
    map_ = as_map(torch.where(own, A * kept.unsqueeze(-1), orthonormal))
    transform = torch.where(own, identity * kept.unsqueeze(-2), transform)
    known = (reduced.out, fold, reduced.null, reduced.dual)
    return Orthonormal(map_, condition, *known, transform, good)


def _orthogonalise(rows: Float[Tensor, "n I m"], level: float) -> tuple[Tensor, Tensor]:
    """Gram–Schmidt with pivoting: orthonormal rows in the places of those kept, else 0.

    With them the distance of each row to the span of those taken before it; 0 where it is no
    more than `level`.
    """
    rest, basis = rows.clone(), torch.zeros_like(rows)
    distance = rows.new_zeros(rows.shape[:2])
    free = torch.ones_like(distance, dtype=torch.bool)
    each = torch.arange(len(rows), device=rows.device)
    for _ in range(min(rows.shape[1:])):
        pivot = rest.square().sum(-1).masked_fill_(~free, -1.0).argmax(-1)
        # From the row itself: in `rest` the rounding of all steps has gathered.
        row = rows[each, pivot]
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            row = row - ((basis @ row.unsqueeze(-1)).mT @ basis).squeeze(-2)
        length = row.norm(dim=-1)
        live = length > level
        if not bool(live.any()):
            break
        row = torch.where(live[:, None], row / length[:, None], 0)
        basis[each, pivot] = row
        distance[each, pivot] = torch.where(live, length, 0)
        free[each, pivot] = False
        overlap = rest @ row.unsqueeze(-1)
        rest.baddbmm_(overlap, row.unsqueeze(-2), alpha=-1)
    return basis, distance


def _transform(rows: Tensor, basis: Tensor, kept: Tensor) -> Float[Tensor, "n I I"]:
    """T with T·rows = basis, zero in the rows and columns of rows that are left out.

    rows·basisᵀ is triangular in the order of the pivots, so it is well behaved where the rows
    kept are independent.
    """
    square = rows @ basis.mT
    both = kept.unsqueeze(-1) & kept.unsqueeze(-2)
    identity = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    solved = torch.linalg.solve(torch.where(both, square, identity), identity.expand_as(square))
    return torch.where(both, solved, 0)


def _null(fold: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """N, the combinations of equations that A maps to nothing, and (N Nᵀ)⁻¹N.

    An equation left out is a_i = c_iᵀA with c_i in `fold`, so e_i − c_i is such a combination.
    They are independent: no cutoff among small singular values is needed to find them.
    """
    null = torch.eye(fold.shape[-1], dtype=fold.dtype, device=fold.device) - fold
    if fold.ndim == 2:
        null = null[~kept]
        q, r = torch.linalg.qr(null.mT)
        return null, torch.linalg.solve_triangular(r, q.mT, upper=True)
    left, singular, right = torch.linalg.svd(null, full_matrices=False)
    # Equations kept have rows of zeros here; all other singular values are 1 or more.
    inverse = torch.where(singular > 0.5, singular.reciprocal(), 0)
    return null, (left * inverse.unsqueeze(-2)) @ right

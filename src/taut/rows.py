"""Which rows of A are independent, and how well they pin z down.

Newton's system A diag(w) Aᵀ is solved after scaling it to a unit diagonal, so rows of very
different size are no trouble. Redundant rows are, and so are rows that are nearly so. They are
found here once, before the first iteration:

- *redundant* rows (in the span of the others to rounding) are left out of the system;
- *nearly redundant* rows: the system is formed with orthonormal rows Q = T A instead of A.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.linear import BatchedMap, DenseMap, LinearMap, dense_map

# Nearer than this to the span of the others, a row makes multipliers so large that the rounding
# of Aᵀλ shows in the residual.
_DISTINCT = 1e-3
# From so many rows on, a few conjugate gradients cost less than a factorisation for each sample.
_MANY = 24


@final
class ConditionWarning(UserWarning):
    """A tiny residual no longer pins down the solution.

    >>> issubclass(ConditionWarning, UserWarning)
    True
    """


@final
class Rough(NamedTuple):
    """A shared, well-conditioned A of many rows, in float32 and with rows of length 1."""

    unit: DenseMap
    inverse: DenseMap  # of unit·unitᵀ
    norms: Float[Tensor, "I"]

    def solve(self, rhs: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """(A Aᵀ)⁻¹ rhs, to a few digits."""
        return self.inverse.apply((rhs / self.norms).float()).to(rhs.dtype) / self.norms


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """The rows Newton works with. Leading dimensions are (), or (N,) when each sample has its A.

    `basis` is the map of Q; with `transform` None, Q is A itself. Rows in `left_out` take no part.
    """

    basis: LinearMap
    left_out: Bool[Tensor, "*n I"] | None
    transform: Float[Tensor, "*n I I"] | None
    projector: Float[Tensor, "*n I I"] | None
    condition: Float[Tensor, "*n"]
    own: Bool[Tensor, "*n"] | None = None  # with a transform: the samples that keep A itself
    rough: "Rough | None" = None
    fold: Float[Tensor, "*n I I"] | None = None  # each row left out as a combination of the others
    kernels: dict[Any, Any] | None = field(default_factory=dict)  # by activation; None forbids them

    def restrict(self, residual: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """T r: the residual of Q z = T b."""
        return residual if self.transform is None else _transform(residual, self.transform)

    def restricted_size(self, size: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """|T| s: how large the entries of T r can be where |r| ≤ s."""
        return size if self.transform is None else _transform(size, self.transform.abs())

    def project(self, x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """x without what redundant rows make irrelevant: its part in the range of A."""
        return x if self.projector is None else _transform(x, self.projector)

    def enter(self, A: LinearMap, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """Multipliers of Q from those of A; rows left out get none."""
        folded = multipliers if self.fold is None else _transform(multipliers, self.fold.mT)
        if self.own is None:
            return folded
        return torch.where(self.own.unsqueeze(-1), folded, self.basis.apply(A.adjoint(multipliers)))

    def folded(self, scale: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """For each row the size of what it is made of: of the rows that imply it, if left out."""
        return scale if self.fold is None else _transform(scale, self.fold.abs())

    def leave(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """Multipliers of A from those of Q. Redundant rows allow many: `project` the smallest."""
        if self.transform is None:
            return multipliers
        return _transform(multipliers, self.transform.mT)

    def rows(self, index: Tensor) -> "Rows":
        """The samples at `index`."""
        if self.condition.ndim == 0:
            return self
        left_out, transform, projector, fold = (
            None if x is None else x[index]
            for x in (self.left_out, self.transform, self.projector, self.fold)
        )
        basis, condition = self.basis.rows(index), self.condition[index]
        own = None if self.own is None else self.own[index]
        return Rows(basis, left_out, transform, projector, condition, own, fold=fold)


def _transform(x: Tensor, matrix: Tensor) -> Tensor:
    if matrix.ndim == 2:
        return DenseMap(matrix).apply(x)
    return BatchedMap(matrix).apply(x)


def unexamined(A: LinearMap) -> Rows:
    """The rows as they are, where looking at them would mean making A dense."""
    return Rows(A, None, None, None, A.data.new_tensor(torch.nan))


def analyse(A: Float[Tensor, "*n I K"], precision: float) -> Rows:
    """Look at the rows of a dense A, (I, K) or (N, I, K), which must be finite.

    Rows are redundant if they are so to `precision`, that of the numbers in A.
    """
    norms = A.norm(dim=-1, keepdim=True)
    unit = A / norms.where(norms > 0, 1)
    factor, info = torch.linalg.cholesky_ex(unit @ unit.mT)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    # A pivot is the distance of a unit row to the span of those before it.
    good = (info == 0) & (pivots > _DISTINCT).all(-1)
    smallest = pivots.amin(-1) if pivots.shape[-1] else A.new_ones(A.shape[:-2])
    if bool(good.all()):
        rough = None
        if A.ndim == 2 and A.shape[0] >= _MANY:
            inverse = torch.cholesky_inverse(factor)
            single = DenseMap(unit.float()), DenseMap(inverse.float())
            rough = Rough(*single, norms.squeeze(-1))
        return Rows(dense_map(A), None, None, None, smallest.reciprocal(), rough=rough)
    rows = _orthonormalise(A, unit, norms, precision)
    worst = rows.condition.max().item()
    if worst * precision**0.5 > 1:
        warnings.warn(
            f"A is ill-conditioned: its rows, scaled to length 1, have condition number about "
            f"{worst:.0e}. A z = b pins z down to {worst * precision:.0e} of its size only, and "
            "the multipliers hardly at all; solution.condition has the estimate for each sample. "
            "Use float64, or rows that are less alike.",
            ConditionWarning,
            stacklevel=2,
        )
    return rows


def _orthonormalise(A: Tensor, unit: Tensor, norms: Tensor, precision: float) -> Rows:
    """Gram–Schmidt with row pivoting, carried out on [unit A | T] so that Q = T A on the left."""
    *batch, rows, columns = A.shape
    scale = torch.diag_embed(norms.where(norms > 0, 1).reciprocal().squeeze(-1))
    count = A.shape[:-2].numel()
    rest = torch.cat([unit, scale], dim=-1).reshape(count, rows, columns + rows)
    basis = torch.zeros_like(rest)
    distance = torch.zeros(rest.shape[:2], dtype=A.dtype, device=A.device)
    chosen = torch.zeros_like(distance, dtype=torch.bool)
    each = torch.arange(len(rest), device=A.device)
    for _ in range(min(rows, columns)):
        lengths = rest[..., :columns].norm(dim=-1).masked_fill(chosen, -1)
        length, pivot = lengths.max(-1)
        live = length > 8 * precision * columns**0.5
        row = rest[each, pivot]
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            overlap = (basis[..., :columns] @ row[:, :columns, None]).mT
            row = row - (overlap @ basis).squeeze(-2)
        row = row / row[:, :columns].norm(dim=-1, keepdim=True)
        row = torch.where(live[:, None], row, torch.zeros_like(row))
        basis[each, pivot] = row
        distance[each, pivot] = torch.where(live, length, distance[each, pivot])
        chosen[each, pivot] = True
        overlap = rest[..., :columns] @ row[:, :columns, None]
        rest = rest - overlap * row[:, None, :]
    basis, distance = basis.reshape(*batch, rows, columns + rows), distance.reshape(*batch, rows)
    kept = distance > 0
    smallest = distance.where(kept, torch.ones_like(distance)).amin(-1)
    transform = basis[..., columns:]
    # Q = T A recomputed, so that the two agree to rounding.
    orthonormal = transform @ A
    left_out = projector = fold = None
    if not bool(kept.all()):
        left_out = ~kept
        identity = torch.eye(rows, dtype=A.dtype, device=A.device)
        fold = torch.where(left_out.unsqueeze(-1), (A @ orthonormal.mT) @ transform, identity)
        projector = _range_projector(fold, kept)
    good = smallest > _DISTINCT
    if bool(good.all()):
        return Rows(dense_map(A), left_out, None, projector, smallest.reciprocal(), fold=fold)
    # A good sample keeps its own rows: products with the identity are exact, so its neighbours
    # change none of its bits.
    own = good[..., None, None]
    identity = torch.eye(rows, dtype=A.dtype, device=A.device) * kept[..., None, :]
    return Rows(
        dense_map(torch.where(own, A * kept.unsqueeze(-1), orthonormal)),
        left_out,
        torch.where(own, identity, transform),
        projector,
        smallest.reciprocal(),
        good,
        fold=fold,
    )


def _range_projector(fold: Tensor, kept: Tensor) -> Tensor:
    """Onto the range of A: off every combination of rows that A maps to nothing.

    A row left out is a_i = c_iᵀA with c_i = Tᵀ(Q a_i), so e_i − c_i is such a combination. They
    are independent, and no cutoff among small singular values is needed to find them.
    """
    identity = torch.eye(fold.shape[-1], dtype=fold.dtype, device=fold.device)
    _, singular, right = torch.linalg.svd(identity - fold, full_matrices=False)
    right = right * (singular > 0.5).to(fold.dtype).unsqueeze(-1)
    whole = kept.all(-1)[..., None, None]
    return torch.where(whole, identity, identity - right.mT @ right)

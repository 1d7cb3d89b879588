"""Which equations are independent, how well they pin z down, and in what basis to work.

Newton's system A diag(w) Aᵀ is factorised by Cholesky, which does not mind equations of very
different size. Redundant equations are found here once, before the first iteration:

- `Plain`: all equations are independent, and are used as they are;
- `Reduced`: *redundant* equations, in the span of the others to rounding, are left out;
- `Orthonormal`: some are *nearly* redundant: the system is formed with Q = T A, whose rows are
  orthonormal, instead of A.
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.maps import LinearMap, as_map
from taut.systems import Rough

# Nearer than this to the span of the others, an equation makes multipliers so large that the
# rounding of Aᵀλ shows in the residual.
_DISTINCT = 1e-3
# Nearer than this it may be redundant, which is then looked at more closely.
_NEAR = 1e-9
# From so many equations on, a few conjugate gradients cost less than a factorisation per sample.
_MANY = 24


@final
class ConditionWarning(UserWarning):
    """A tiny residual no longer pins down the solution.

    >>> issubclass(ConditionWarning, UserWarning)
    True
    """


class Basis(ABC):
    """The equations Newton works with; tensors lead with (N,) where each sample has its A."""

    map: LinearMap  # of Q, in the dtype of the solve
    condition: Float[Tensor, "*n"]  # of the rows of A, scaled to length 1; NaN where not looked at

    @property
    def left_out(self) -> Bool[Tensor, "*n I"] | None:
        """The redundant equations; None where there are none."""
        return None

    @property
    def transformed(self) -> bool:
        """Is Q another matrix than A?"""
        return False

    @property
    def rough(self) -> Rough | None:
        """What rough steps need, where they are worth it."""
        return None

    def restrict(self, residual: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """T r: the residual of Q z = T b."""
        return residual

    def restricted_size(self, size: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """|T| s: how large the entries of T r can be where |r| ≤ s."""
        return size

    def enter(self, A: LinearMap, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """Multipliers of Q from those of A; equations left out get none."""
        return multipliers

    def leave(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """Multipliers of A from those of Q. Redundant equations allow many: `project` is the
        smallest."""
        return multipliers

    def project(self, x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """The part of x in the range of A: without what redundant equations make irrelevant."""
        return x

    def folded(self, scale: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """For each equation the size of what it is made of: of those that imply it, if left out."""
        return scale

    def contradictory(self, b: Float[Tensor, "n I"], eps: float) -> Bool[Tensor, "n"]:
        """Where b, given to `eps`, is plainly out of the range of A."""
        gap = (b - self.project(b)).abs()
        return (gap > eps**0.5 * b.abs().amax(-1, keepdim=True)).any(-1)

    def smallest(self, A: LinearMap, v: Tensor, raw: Tensor, eps: float) -> Tensor:
        """Of all multipliers that give the u of `raw`, the smallest."""
        least = self.project(raw)
        # It moves u where equations are redundant to the precision of A only, and where λ of one
        # size is mixed with λ of another, as of equations of very different size.
        moved = A.adjoint(least - raw).abs()
        scale = A.abs().adjoint(least.abs() + raw.abs()) + v.abs()
        return torch.where((moved <= 8 * eps * scale).all(-1, keepdim=True), least, raw)

    @abstractmethod
    def take(self, index: Int[Tensor, "n"]) -> "Basis":
        """The basis of the samples at `index`."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "Basis":
        """The basis in another dtype."""


@dataclass(frozen=True, eq=False)
class Plain(Basis):
    """All equations, as they are; also those of a sparse A, which nobody has looked at."""

    map: LinearMap
    condition: Float[Tensor, "*n"]

    @cached_property
    def rough(self) -> Rough | None:
        """Worth it for many equations that all samples share and that are far from dependent."""
        if not self.map.shared or self.map.shape[0] < _MANY or bool(self.condition.isnan()):
            return None
        return Rough.of(self.map.data)

    def take(self, index: Int[Tensor, "n"]) -> "Plain":
        if self.condition.ndim == 0:
            return self
        return replace(self, map=self.map.take(index), condition=self.condition[index])

    def to(self, dtype: torch.dtype) -> "Plain":
        data, condition = self.map.data.to(dtype), self.condition.to(dtype)
        return replace(self, map=self.map.over(data), condition=condition)


@dataclass(frozen=True, eq=False)
class Reduced(Basis):
    """Without the equations that others imply.

    Equation i is the combination `fold`_i of the equations kept.
    """

    map: LinearMap
    condition: Float[Tensor, "*n"]
    out: Bool[Tensor, "*n I"]
    fold: Float[Tensor, "*n I I"]
    range: Float[Tensor, "*n I I"]  # the projector onto the range of A

    _tensors: ClassVar = ("condition", "out", "fold", "range")

    @property
    def left_out(self) -> Bool[Tensor, "*n I"]:
        return self.out

    def enter(self, A: LinearMap, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return _times(self.fold.mT, multipliers)

    def project(self, x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return _times(self.range, x)

    def folded(self, scale: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return _times(self.fold.abs(), scale)

    def take(self, index: Int[Tensor, "n"]) -> "Reduced":
        if self.condition.ndim == 0:
            return self
        taken = {name: getattr(self, name)[index] for name in self._tensors}
        return replace(self, map=self.map.take(index), **taken)

    def to(self, dtype: torch.dtype) -> "Reduced":
        numbers = {
            name: x for name in self._tensors if (x := getattr(self, name)).is_floating_point()
        }
        cast = {name: x.to(dtype) for name, x in numbers.items()}
        return replace(self, map=self.map.over(self.map.data.to(dtype)), **cast)


@final
@dataclass(frozen=True, eq=False)
class Orthonormal(Reduced):
    """Q = T A with orthonormal rows; samples in `own` keep the rows of their A."""

    transform: Float[Tensor, "*n I I"]
    own: Bool[Tensor, "*n"]

    _tensors: ClassVar = (*Reduced._tensors, "transform", "own")

    @property
    def transformed(self) -> bool:
        return True

    @property
    def left_out(self) -> Bool[Tensor, "*n I"] | None:
        return self.out if bool(self.out.any()) else None

    def restrict(self, residual: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return _times(self.transform, residual)

    def restricted_size(self, size: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return _times(self.transform.abs(), size)

    def enter(self, A: LinearMap, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        folded = _times(self.fold.mT, multipliers)
        return torch.where(self.own.unsqueeze(-1), folded, self.map.apply(A.adjoint(multipliers)))

    def leave(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return _times(self.transform.mT, multipliers)


def _times(matrix: Float[Tensor, "*n I I"], x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
    if matrix.ndim == 2:
        return x @ matrix.mT
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def unexamined(A: LinearMap) -> Plain:
    """The equations as they are, where looking at them would mean making A dense."""
    return Plain(A, A.data.new_tensor(torch.nan))


def analyse(A: Float[Tensor, "*n I K"], precision: float) -> Basis:
    """Look at a dense A, (I, K) or (N, I, K), which must be finite.

    Equations are redundant if they are so to `precision`, that of the numbers in A.

    >>> type(analyse(torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64), 1e-16)).__name__
    'Reduced'
    """
    norms = A.norm(dim=-1, keepdim=True)
    unit = A / norms.where(norms > 0, 1)
    factor, info = torch.linalg.cholesky_ex(unit @ unit.mT)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    # A pivot is the distance of a unit row to the span of those before it.
    if bool(((info == 0) & (pivots > _DISTINCT).all(-1)).all()):
        smallest = pivots.amin(-1) if pivots.shape[-1] else A.new_ones(A.shape[:-2])
        return Plain(as_map(A), smallest.reciprocal())
    basis = _reduced(A, unit, norms, precision) if A.ndim == 2 else None
    basis = basis or _examined(A, unit, norms, precision)
    worst = basis.condition.max().item()
    if worst * precision**0.5 > 1:
        warnings.warn(
            f"A is ill-conditioned: its rows, scaled to length 1, have condition number about "
            f"{worst:.0e}. A z = b pins z down to {worst * precision:.0e} of its size only, and "
            "the multipliers hardly at all; solution.condition has the estimate for each sample. "
            "Use float64, or equations that are less alike.",
            ConditionWarning,
            stacklevel=2,
        )
    return basis


def _reduced(A: Tensor, unit: Tensor, norms: Tensor, precision: float) -> Reduced | None:
    """A well-conditioned A with some redundant equations, by LAPACK; None where it is not one.

    In unitᵀ = Q R the diagonal of R holds the distance of each row to the span of those before
    it, with the rounding of a long sum. So rows that come near are left out first, and then
    compared with the combination of the others that they are nearest to.
    """
    level = max(_NEAR, 8 * precision * A.shape[1] ** 0.5)
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
    own = 8 * torch.finfo(A.dtype).eps * (1 + parts.abs() @ base.abs()).norm(dim=-1)
    if bool((rest.norm(dim=-1) > own.clamp_min(8 * precision * A.shape[1] ** 0.5)).any()):
        return None
    fold = torch.eye(len(A), dtype=A.dtype, device=A.device)
    size = norms.where(norms > 0, 1).squeeze(-1)
    fold[~kept] = 0
    fold[(~kept).nonzero(), kept.nonzero().squeeze(-1)] = norms[~kept] * parts / size[kept]
    condition = distance.min().reciprocal()
    return Reduced(as_map(A), condition, ~kept, fold, _range_projector(fold, kept))


def _examined(A: Tensor, unit: Tensor, norms: Tensor, precision: float) -> Basis:
    *batch, rows, columns = A.shape
    count = A.shape[:-2].numel()
    # The rows in the coordinates of an orthonormal basis of their span: I numbers each, not K.
    flat = unit.reshape(count, rows, columns)
    coordinates = torch.linalg.qr(flat.mT, mode="r").R.mT if columns > rows else flat
    level = 8 * precision * columns**0.5
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
    good = smallest > _DISTINCT
    condition = smallest.reciprocal()
    if bool((good & kept.all(-1)).all()):
        return Plain(as_map(A), condition)
    known = (~kept, fold, _range_projector(fold, kept))
    if bool(good.all()):
        return Reduced(as_map(A), condition, *known)
    # A good sample keeps its own rows.
    own = good[..., None, None]
    map_ = as_map(torch.where(own, A * kept.unsqueeze(-1), orthonormal))
    transform = torch.where(own, identity * kept.unsqueeze(-2), transform)
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


def _range_projector(fold: Tensor, kept: Tensor) -> Tensor:
    """Onto the range of A: off every combination of equations that A maps to nothing.

    An equation left out is a_i = c_iᵀA with c_i in `fold`, so e_i − c_i is such a combination.
    They are independent: no cutoff among small singular values is needed to find them.
    """
    identity = torch.eye(fold.shape[-1], dtype=fold.dtype, device=fold.device)
    out = (~kept).nonzero()
    if fold.ndim == 2:
        null = (identity - fold)[out[:, 0]]
        q = torch.linalg.qr(null.mT).Q
        return identity - q @ q.mT
    _, singular, right = torch.linalg.svd(identity - fold, full_matrices=False)
    right = right * (singular > 0.5).to(fold.dtype).unsqueeze(-1)
    whole = kept.all(-1)[..., None, None]
    return torch.where(whole, identity, identity - right.mT @ right)

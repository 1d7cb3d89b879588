"""Which equations are independent, how well they pin z down, and in what basis to work.

Newton's system A diag(w) Aᵀ is factorised by Cholesky, which does not mind equations of very
different size. Redundant equations are found here once, before the first iteration:

- `Plain`: all equations are independent, and are used as they are;
- `Reduced`: *redundant* equations, in the span of the others to rounding, are left out;
- `Orthonormal`: some are *nearly* redundant: the system is formed with Q = T A, whose rows are
  orthonormal, instead of A;
- `Scaled`: one of these for rows scaled by powers of 2, so that no square overflows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.maps import LinearMap
from taut.systems import Rough

# From so many equations on, a few conjugate gradients cost less than a factorisation per sample.
_MANY = 24


class Basis(ABC):
    """The equations Newton works with; tensors lead with (N,) where each sample has its A."""

    map: LinearMap  # of Q, in the dtype of the solve
    condition: Float[Tensor, "*n"]  # of the rows of A, scaled to length 1; NaN where not looked at
    scale: Float[Tensor, "*n I"] | None = None  # by what the rows were scaled first

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

    def least(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """Of all multipliers that move u alike, the smallest."""
        return self.project(multipliers)

    def inward(self, x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """`project` at the equations kept, to the digits of each: for derivatives."""
        return self.project(x)

    def outward(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """`least` of multipliers that are 0 for equations left out, to the digits of each."""
        return self.least(multipliers)

    @property
    def metric(self) -> Float[Tensor, "*n I I"] | None:
        """R with |R⁻ᵀs| = |`outward` s|; None where that is |s|."""
        return None

    def metric_of(self, index: Int[Tensor, "n"]) -> Float[Tensor, "#n I I"] | None:
        """`metric` of the samples at `index`."""
        metric = self.metric
        if metric is None:
            return None
        return metric.unsqueeze(0) if metric.ndim == 2 else metric[index]

    def smallest(self, A: LinearMap, v: Tensor, raw: Tensor, eps: float) -> Tensor:
        """Of all multipliers that give the u of `raw`, the smallest."""
        least = self.least(raw)
        # It moves u where equations are redundant to the rounding of their largest entries only,
        # and where larger terms of `raw` have cancelled.
        moved = A.adjoint(least - raw).abs()
        scale = A.abs().adjoint(least.abs()) + v.abs()
        return torch.where((moved <= 32 * eps * scale).all(-1, keepdim=True), least, raw)

    def folded(self, scale: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        """For each equation the size of what it is made of: of those that imply it, if left out."""
        return scale

    def disagreement(
        self, residual: Float[Tensor, "n I"], scale: Float[Tensor, "n I"]
    ) -> Float[Tensor, "n I"] | float:
        """The part of a residual that no z removes, as small as can be over `scale`."""
        return 0.0

    def contradictory(
        self, b: Float[Tensor, "n I"], scale: Float[Tensor, "n I"], eps: float
    ) -> Bool[Tensor, "n"]:
        """Where b, the rounding to `eps` of sums of size `scale`, is plainly no A z."""
        return torch.zeros_like(b[..., 0], dtype=torch.bool)

    @abstractmethod
    def take(self, index: Int[Tensor, "n"]) -> "Basis":
        """The basis of the samples at `index`."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "Basis":
        """The basis in another dtype."""


@dataclass(frozen=True, eq=False)
class Plain(Basis):
    """All equations, as they are; also those that nobody has looked at."""

    map: LinearMap
    condition: Float[Tensor, "*n"]

    @cached_property
    def rough(self) -> Rough | None:
        """Worth it for many equations that all samples share and that are far from dependent."""
        if not self.map.shared or self.map.sparse or self.map.shape[0] < _MANY:
            return None
        if bool(self.condition.isnan()):
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
    null: Float[Tensor, "*n m I"]  # rows e_i − `fold`_i, which A maps to nothing
    dual: Float[Tensor, "*n m I"]  # (N Nᵀ)⁻¹N for these rows N

    _tensors: ClassVar = ("condition", "out", "fold", "null", "dual")

    @property
    def left_out(self) -> Bool[Tensor, "*n I"]:
        return self.out

    def enter(self, A: LinearMap, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return times(self.fold.mT, multipliers)

    def project(self, x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        # Not by one matrix: however `dual` is rounded, x moves along N only, and so moves no u.
        return x - times(self.null.mT, times(self.dual, x))

    def inward(self, x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return times(self._inverse, x)

    def outward(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return times(self._inverse.mT, multipliers)

    @property
    def metric(self) -> Float[Tensor, "*n I I"]:
        """R of `fold` = Q R, and the identity where equations are left out."""
        return self._factors[1]

    @property
    def _inverse(self) -> Float[Tensor, "*n I I"]:
        """(FᵀF)⁻¹Fᵀ of F = `fold`, by which Fy is the part of x in the range of A.

        Not x less what is out of the range: where equations differ much in size, a small one has
        so little of x that nothing would be left but rounding.
        """
        return self._factors[0]

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        whole = torch.cat([self.fold, torch.diag_embed(self.out.to(self.fold.dtype))], -2)
        # Large rows first, or they would drown the small ones within the factorisation.
        column = whole.abs().amax(-2, keepdim=True)
        order = (whole / column).abs().amax(-1).argsort(-1, descending=True).unsqueeze(-1)
        Q, R = torch.linalg.qr(whole.gather(-2, order.expand_as(whole)))
        Q = torch.zeros_like(Q).scatter(-2, order.expand_as(Q), Q)
        inverse = torch.linalg.solve_triangular(R, Q.mT, upper=True)[..., : self.fold.shape[-2]]
        return inverse.masked_fill(self.out.unsqueeze(-1), 0), R

    def folded(self, scale: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return times(self.fold.abs(), scale)

    def contradictory(
        self, b: Float[Tensor, "n I"], scale: Float[Tensor, "n I"], eps: float
    ) -> Bool[Tensor, "n"]:
        gap, size = times(self.null, b).abs(), times(self.null.abs(), scale)
        return (gap > eps**0.5 * size).any(-1)

    def disagreement(
        self, residual: Float[Tensor, "n I"], scale: Float[Tensor, "n I"]
    ) -> Float[Tensor, "n I"]:
        # S²Nᵀ(N S² Nᵀ)⁻¹N r with S = diag(scale).
        size = (scale / scale.amax(-1, keepdim=True)).nan_to_num(0.0).clamp_min(1e-100)
        wide = self.null * size.unsqueeze(-2)
        gram = wide @ wide.mT
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        diagonal.masked_fill_(diagonal == 0, 1)
        ratio = diagonal.rsqrt()
        gram = gram * ratio.unsqueeze(-1) * ratio.unsqueeze(-2)
        rhs = (ratio * times(self.null, residual)).unsqueeze(-1)
        parts = torch.linalg.solve_ex(gram, rhs).result.squeeze(-1)
        return size * times(wide.mT, ratio * parts)

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
        return times(self.transform, residual)

    def restricted_size(self, size: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return times(self.transform.abs(), size)

    def enter(self, A: LinearMap, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        folded = times(self.fold.mT, multipliers)
        return torch.where(self.own.unsqueeze(-1), folded, self.map.apply(A.adjoint(multipliers)))

    def leave(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return times(self.transform.mT, multipliers)


@final
@dataclass(frozen=True, eq=False)
class Scaled(Basis):
    """The basis `of` S A, where S = diag(`scale`) brings every row to a size near 1."""

    of: Basis
    # Powers of 2.
    scale: Float[Tensor, "*n I"]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def map(self) -> LinearMap:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.map

    @property
    def condition(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.condition

    @property
    def left_out(self) -> Bool[Tensor, "*n I"] | None:
        return self.of.left_out

    @property
    def metric(self) -> Float[Tensor, "*n I I"] | None:
        return self.of.metric

    @property
    def transformed(self) -> bool:
        return True

    def restrict(self, residual: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return self.of.restrict(self.scale * residual)

    def restricted_size(self, size: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return self.of.restricted_size(self.scale * size)

    def enter(self, A: LinearMap, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return self.of.enter(A.scaled(self.scale), multipliers / self.scale)

    def leave(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return self.scale * self.of.leave(multipliers)

    def project(self, x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return self.of.project(self.scale * x) / self.scale

    def least(self, multipliers: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return self.scale * self.of.least(multipliers / self.scale)

    def folded(self, scale: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return self.of.folded(self.scale * scale) / self.scale

    def contradictory(
        self, b: Float[Tensor, "n I"], scale: Float[Tensor, "n I"], eps: float
    ) -> Bool[Tensor, "n"]:
        return self.of.contradictory(self.scale * b, self.scale * scale, eps)

    def disagreement(
        self, residual: Float[Tensor, "n I"], scale: Float[Tensor, "n I"]
    ) -> Float[Tensor, "n I"] | float:
        return self.of.disagreement(self.scale * residual, self.scale * scale) / self.scale

    def take(self, index: Int[Tensor, "n"]) -> "Scaled":
        if self.scale.ndim == 1:
            return self
        return Scaled(self.of.take(index), self.scale[index])

    def to(self, dtype: torch.dtype) -> "Scaled":
        return Scaled(self.of.to(dtype), self.scale.to(dtype))


def times(matrix: Float[Tensor, "*n m I"], x: Float[Tensor, "n I"]) -> Float[Tensor, "n m"]:
    """Matrix times x for each sample, with one matrix or one a sample."""
    if matrix.ndim == 2:
        return x @ matrix.mT
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)

"""lower ≤ C z ≤ upper and bounds on z, in float64: what all parts of the chain ask of them.

ν carries its sign: ν_i > 0 holds (C z)_i at its lower side, ν_i < 0 at its upper one, and ν_i = 0
says that neither is active. z = clip(σ(v + Cᵀν)), with slope 0 where it is clipped.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.activations import Activation
from taut.activations.codes import bends
from taut.maps import LinearMap
from taut.systems import Factor, solve_gram

EPS = 2.0**-52
TINY = 1e-290
_PART = 0.25  # of the size of the numbers given: a unit of u at bounds, where no σ bends


@final
class Point(NamedTuple):
    """Multipliers ν and what they give."""

    multipliers: Float[Tensor, "n M"]
    u: Float[Tensor, "n K"]
    z: Float[Tensor, "n K"]
    w: Float[Tensor, "n K"]  # dz/du
    r: Float[Tensor, "n M"]  # C z

    def take(self, index: Int[Tensor, "n"]) -> "Point":
        """The samples at `index`."""
        return Point(*(x[index] for x in self))

    def finite(self) -> Bool[Tensor, "n"]:
        """Where C z and the slopes are numbers, and so all is."""
        return (self.r.abs().sum(-1) + self.w.sum(-1)).isfinite()

    def write(self, index: Int[Tensor, "n"], part: "Point") -> None:
        """Put `part` at `index`, in place."""
        for x, y in zip(self, part, strict=True):
            x.index_copy_(0, index, y)


@final
class Levels(NamedTuple):
    """What is left of the optimality conditions, by three measures, the worst row each.

    `plain` is over |side| + |C||z|; `fair` over that and |C| w|v|, also where all outputs of a row
    are 0; `rough` over the rounding of u as well, w(|v| + |C|ᵀ|ν|). The last decides nothing by
    itself: where no solution exists, ν runs away and takes it along.
    """

    plain: Float[Tensor, "n"]
    fair: Float[Tensor, "n"]
    rough: Float[Tensor, "n"]


@final
@dataclass(frozen=True, eq=False)
class Sides:
    """n samples, every number finite but for sides that are not there, which are ±inf."""

    activation: Activation
    line: bool  # is σ a line?
    C: LinearMap
    v: Float[Tensor, "n K"]
    lower: Float[Tensor, "n M"]
    upper: Float[Tensor, "n M"]
    floor: Float[Tensor, "n K"] | None = None  # bounds on z itself
    ceiling: Float[Tensor, "n K"] | None = None

    def take(self, index: Int[Tensor, "n"]) -> "Sides":
        """The samples at `index`."""
        floor = None if self.floor is None else self.floor[index]
        ceiling = None if self.ceiling is None else self.ceiling[index]
        return replace(
            self,
            C=self.C.take(index),
            v=self.v[index],
            lower=self.lower[index],
            upper=self.upper[index],
            floor=floor,
            ceiling=ceiling,
        )

    @property
    def equal(self) -> Bool[Tensor, "n M"]:
        """Which rows are equations."""
        return self.lower == self.upper

    @property
    def bends(self) -> Bool[Tensor, "K"] | None:
        """The outputs whose σ bends; None where all do."""
        return bends(self.activation, self.v.shape[-1])

    @property
    def own_size(self) -> float:
        """A move of u that counts whatever the numbers given: 1, but 0 where no σ bends."""
        return 1.0 if self.bends is None else float(self.bends.any())

    @cached_property
    def extent(self) -> Float[Tensor, "n"]:
        """The size of the numbers given, as moves of u."""
        w = self.activation.slope(self.v)
        size = torch.maximum(self.v.abs(), self.clip(self.activation.sigma(self.v)).abs() / w)
        size, terms = size.amax(-1), self.C.abs().apply(w)
        for x in (self.lower, self.upper):
            ratio = x.where(x.isfinite(), 0).abs() / terms
            size = size + ratio.nan_to_num(0.0, 0.0, 0.0).sum(-1)
        return size

    @property
    def unit(self) -> Float[Tensor, "n"] | None:
        """That of a move of u at bounds where no σ bends; None where it is free."""
        if self.bends is None or self.floor is None:
            return None
        return (_PART * self.extent).clamp_min(TINY)

    def reach(self, step: Float[Tensor, "n M"]) -> Float[Tensor, "n"]:
        """How far a step moves u, in units of σ where it bends, and of `extent` at bounds."""
        far, which = self.C.adjoint(step).abs(), self.bends
        if which is None:
            return far.amax(-1)
        bent = far * which.to(far)
        unit = self.unit
        return (bent if unit is None else torch.maximum(bent, far / unit.unsqueeze(-1))).amax(-1)

    @property
    def straight(self) -> bool:
        """Is z a linear function of ν?"""
        return self.line and self.floor is None

    def clip(self, z: Float[Tensor, "n K"]) -> Float[Tensor, "n K"]:
        """z within its bounds."""
        if self.floor is None or self.ceiling is None:
            return z
        return torch.minimum(torch.maximum(z, self.floor), self.ceiling)

    def point(self, multipliers: Float[Tensor, "n M"]) -> Point:
        """u, z, w and C z at ν."""
        u = self.C.shifted_adjoint(self.v, multipliers)
        z, w = self.activation.sigma(u), self.activation.slope(u)
        w, z = self.free(z, w), self.clip(z)
        return Point(multipliers, u, z, w, self.C.apply(z))

    def free(self, z: Float[Tensor, "n K"], slope: Float[Tensor, "n K"]) -> Float[Tensor, "n K"]:
        """dz/du: the slope of σ, 0 where z is clipped."""
        if self.floor is None or self.ceiling is None:
            return slope
        return torch.where((z > self.floor) & (z < self.ceiling), slope, 0)

    def ends(self) -> tuple[Float[Tensor, "n K"], Float[Tensor, "n K"]]:
        """Where z may lie: its range and its bounds."""
        lower, upper = (x.expand_as(self.v) for x in self.activation.range.bounds(self.v))
        if self.floor is None or self.ceiling is None:
            return lower, upper
        return torch.maximum(lower, self.floor), torch.minimum(upper, self.ceiling)

    def gradient(self, multipliers: Tensor, r: Tensor) -> Float[Tensor, "n M"]:
        """The smallest subgradient of D: 0 where ν is optimal."""
        near = r - torch.minimum(torch.maximum(r, self.lower), self.upper)
        s = torch.where(multipliers < 0, r - self.upper, near)
        return torch.where((multipliers > 0) | self.equal, r - self.lower, s)

    def held_at(self, multipliers: Tensor) -> Float[Tensor, "n M"]:
        """The side at which ν holds each row; 0 where it is inactive."""
        side = torch.where(multipliers < 0, self.upper, 0)
        return torch.where((multipliers > 0) | self.equal, self.lower, side)

    def size(self, multipliers: Tensor, z: Tensor) -> Float[Tensor, "n M"]:
        """|side| + |C||z|: the terms of C z − side."""
        terms = self.held_at(multipliers).abs() + self.C.abs().apply(z.abs())
        return terms.clamp_min(TINY)

    def measure(
        self, point: Point, s: Tensor
    ) -> tuple[Levels, Float[Tensor, "n M"], Float[Tensor, "n M"]]:
        """The levels of s, s without what is rounding, and what may be rounding of it.

        A row at its side must not become active for 1e-17: that part of s is set to 0.
        """
        C, ν = self.C.abs(), point.multipliers
        plain = self.size(ν, point.z)
        # A size that has overflowed must not make every residual small.
        fair = plain + C.apply(point.w * self.v.abs())
        fair = torch.where(fair < torch.inf, fair, plain)
        rough = fair + C.apply(point.w * C.adjoint(ν.abs()))
        rough = torch.where(rough < torch.inf, rough, fair)
        noise = torch.minimum(2 * EPS * rough, 1e-13 * fair)
        idle = (ν == 0) & ~self.equal & (s.abs() <= noise)
        levels = Levels(*(_worst(s, scale) for scale in (plain, fair, rough)))
        return levels, s.masked_fill(idle, 0), 4 * EPS * rough

    def keeps(
        self, z: Tensor, most: float, first: int = 0, multipliers: Tensor | None = None
    ) -> Bool[Tensor, "n"]:
        """Is every row from `first` on within `most` of |side| + |C||z|?

        One whose multiplier is not 0, of its side.
        """
        r, terms = self.C.apply(z), self.C.abs().apply(z.abs())
        ν = torch.zeros_like(r) if multipliers is None else multipliers
        s = self.gradient(ν, r)
        side = torch.where(s < 0, self.lower, self.upper)
        side = torch.where((ν != 0) & ~self.equal, self.held_at(ν), side)
        size = torch.where(s != 0, side.abs() + terms, 1)
        size = size.clamp_min(torch.finfo(size.dtype).tiny)
        return _worst(s[:, first:], size[:, first:]) <= most

    def refined(self, point: Point, most: float) -> Point:
        """Corrections that help, up to three, until every row keeps `most`."""
        point = self._corrected(point)
        for _ in range(2):
            kept = self.keeps(point.z, most, multipliers=point.multipliers)
            left = (~kept).nonzero().squeeze(-1)
            if not len(left):
                break
            part = self.take(left)._corrected(point.take(left))
            point = Point(*(x.index_copy(0, left, y) for x, y in zip(point, part, strict=True)))
        return point

    def _corrected(self, point: Point) -> Point:
        """z −= W C_Fᵀ H⁻¹ s_F, and ν and u with it where u moves visibly.

        u = v + Cᵀν has the rounding of |v| + |Cᵀν|; z itself need not have it. Where it would no
        longer be σ(u) but for that rounding, it is computed anew; where σ is a line and z is far
        below it, z is 0: a row that holds outputs at 0 has no other size to keep the rule by.
        """
        active = (point.multipliers != 0) | self.equal
        side, size = self.held_at(point.multipliers), self.size(point.multipliers, point.z)
        s = torch.where(active, point.r - side, 0)
        move, solved = self._solve(point.w, active, s)
        shift = self.C.adjoint(move)
        blur = self.v.abs() + self.C.abs().adjoint(point.multipliers.abs())
        near = (shift.abs() <= 32 * EPS * blur).all(-1, keepdim=True)
        moved = self.point(torch.where(near, point.multipliers, point.multipliers - move))
        z = self.clip(point.z - point.w * shift)
        # The rounding of u moves an output off its bound too, where w is 0.
        slope, there = self.activation.slope(point.u), self.activation.slope(moved.u)
        along = torch.minimum(slope, there) * blur
        along = (z - moved.z).abs() <= 32 * EPS * (point.z.abs() + along)
        along = along.all(-1, keepdim=True)
        z = torch.where(along, z, moved.z)
        u = torch.where(along & ~near, point.u - shift, moved.u)
        lower, upper = self.ends()
        if self.line:  # the slope is that of clipped outputs too
            nothing = z.abs() <= EPS**1.5 * blur * slope
            z = z.masked_fill(nothing & (lower <= 0) & (upper >= 0), 0)
        moved = moved._replace(u=u, z=z, w=self.free(z, there), r=self.C.apply(z))
        left = torch.where(active, moved.r - side, 0)
        better = (_worst(left, size) < _worst(s, size)) & solved
        better = better & ((z >= lower) & (z <= upper)).all(-1)
        kept = self.equal | (moved.multipliers * point.multipliers > 0) | ~active
        better = (better & kept.all(-1)).unsqueeze(-1)
        return Point(*(torch.where(better, x, y) for x, y in zip(moved, point, strict=True)))

    def _solve(self, w: Tensor, active: Tensor, s: Tensor) -> tuple[Tensor, Bool[Tensor, "n"]]:
        """H⁻¹s on the active rows, and where that could be done."""
        if self.C.iterative:
            return solve_gram(self.C, w, s, ~active), torch.ones_like(active[:, 0])
        gram = masked(self.C.gram(w), active, 1e-12)
        triangle, info = torch.linalg.cholesky_ex(gram)
        return torch.where(active, Factor(triangle, None, None).solve(s), 0), info == 0


def masked(
    gram: Float[Tensor, "n M M"], active: Bool[Tensor, "n M"], lift: float
) -> Float[Tensor, "n M M"]:
    """The active rows of a matrix, the identity in the others; in place."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1).clone()
    gram.mul_((active.unsqueeze(-1) & active.unsqueeze(-2)).to(gram.dtype))
    own = torch.where(active, diagonal * (1 + lift) + TINY, 1)
    gram.diagonal(dim1=-2, dim2=-1).copy_(own)
    return gram


def _worst(s: Tensor, scale: Tensor | float) -> Float[Tensor, "n"]:
    if s.shape[-1] == 0:
        return s.new_zeros(len(s))
    return (s.abs() / scale).amax(-1).nan_to_num(torch.inf)

"""The path of the interior point method: rows, a point with its slacks, how far it is from optimal.

Rows have length 1. Slacks `below` = C z − lower and `above` = upper − C z have multipliers `up` and
`down`, ν = up − down, and u = t v + Cᵀν holds exactly. The logits are annealed: t, a variable of
the path like the others, grows to 1. Bounds on z are K more rows.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.activations import Activation
from taut.maps import LinearMap
from taut.solvers.sides import TINY, Sides

_START = 2.0  # the largest logit that the path begins with
_NONE = 1e-140  # a distance that is none: its square is no number
_LEAST = 1e-3  # of the largest row: no row is measured by less


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of length 1, then bounds on z: one list."""

    activation: Activation
    line: bool
    even: bool  # does no σ bend?
    C: LinearMap
    norm: Float[Tensor, "*n M"]
    v: Float[Tensor, "n K"]
    boxed: bool
    lower: Float[Tensor, "n L"]  # 0 where there is none
    upper: Float[Tensor, "n L"]
    equal: Bool[Tensor, "n L"]
    has_lower: Bool[Tensor, "n L"]  # and is no equation
    has_upper: Bool[Tensor, "n L"]
    unit_z: Float[Tensor, "n 1"]  # sizes of slacks and of multipliers
    unit_u: Float[Tensor, "n 1"]

    @staticmethod
    def of(sides: Sides) -> "Rows":
        norm = sides.C.norms().clamp_min(TINY)
        C = sides.C.scaled(norm.reciprocal())
        lower, upper = sides.lower / norm, sides.upper / norm
        boxed = sides.floor is not None and sides.ceiling is not None
        if sides.floor is not None and sides.ceiling is not None:
            lower, upper = (
                torch.cat(x, -1) for x in ((lower, sides.floor), (upper, sides.ceiling))
            )
        equal = lower == upper
        low, high = lower.isfinite() & ~equal, upper.isfinite() & ~equal
        lower, upper = lower.where(lower.isfinite(), 0), upper.where(upper.isfinite(), 0)
        unit = sides.v.new_ones(len(sides.v), 1)
        given = (C, norm, sides.v, boxed, lower, upper, equal, low, high, unit, unit)
        return Rows(sides.activation, sides.line, sides.own_size == 0, *given)

    def apply(self, z: Tensor) -> Float[Tensor, "n L"]:
        return torch.cat([self.C.apply(z), z], -1) if self.boxed else self.C.apply(z)

    def adjoint(self, ν: Tensor) -> Float[Tensor, "n K"]:
        count = self.C.shape[0]
        return self.C.adjoint(ν[:, :count]) + ν[:, count:] if self.boxed else self.C.adjoint(ν)

    def terms(self, z: Tensor) -> Float[Tensor, "n L"]:
        """|C||z|."""
        size = self.C.abs().apply(z.abs())
        return torch.cat([size, z.abs()], -1) if self.boxed else size

    def with_units(self, unit_z: Tensor, unit_u: Tensor) -> "Rows":
        return Rows(**{**self.__dict__, "unit_z": unit_z, "unit_u": unit_u})

    def take(self, index: Tensor) -> "Rows":
        own = {name: x for name, x in self.__dict__.items()}
        for name in ("v", "lower", "upper", "equal", "has_lower", "has_upper", "unit_z", "unit_u"):
            own[name] = own[name][index]
        own["C"] = self.C.take(index)
        own["norm"] = self.norm if self.C.shared else self.norm[index]
        return Rows(**own)


@final
class Path(NamedTuple):
    """Where the samples are."""

    t: Float[Tensor, "n 1"]
    ν: Float[Tensor, "n L"]
    below: Float[Tensor, "n L"]
    above: Float[Tensor, "n L"]
    up: Float[Tensor, "n L"]
    down: Float[Tensor, "n L"]
    u: Float[Tensor, "n K"]
    z: Float[Tensor, "n K"]
    r: Float[Tensor, "n L"]

    def take(self, index: Tensor) -> "Path":
        return Path(*(x[index] for x in self))


def begin(rows: Rows) -> tuple[Rows, Path]:
    """A point between the sides, near σ(t v), and sizes for slacks and multipliers."""
    v, low, high = rows.v, rows.has_lower, rows.has_upper
    t = torch.ones_like(rows.unit_z)
    if not rows.even:
        t = (_START / v.abs().amax(-1, keepdim=True).clamp_min(TINY)).clamp(max=1.0)
    z, w = rows.activation.sigma(t * v), rows.activation.slope(t * v)
    r = rows.apply(z)
    unit_z, unit_u = w.amax(-1, keepdim=True), torch.ones_like(rows.unit_u)
    if rows.even:
        off = torch.where(low | rows.equal, rows.lower - r, 0)
        off = torch.maximum(off, torch.where(high | rows.equal, r - rows.upper, 0))
        far = torch.maximum(most_of(off), 1e-6 * z.abs().amax(-1, keepdim=True))
        unit_z = torch.where(far > _NONE, far, 1)
        unit_u = unit_z / w.amax(-1, keepdim=True)
    width = torch.where(low & high, rows.upper - rows.lower, torch.inf)
    room = torch.minimum(unit_z, 0.5 * width)
    inside = torch.where(low, torch.maximum(r, rows.lower + room), r)
    inside = torch.where(high, torch.minimum(inside, rows.upper - room), inside)
    below = torch.where(low, torch.maximum(inside - rows.lower, room), 1)
    above = torch.where(high, torch.maximum(rows.upper - inside, room), 1)
    up = torch.where(low, unit_z * unit_u / below, 0)
    down = torch.where(high, unit_z * unit_u / above, 0)
    ν = torch.where(rows.equal, 0, up - down)
    u = t * v + rows.adjoint(ν)
    z = rows.activation.sigma(u)
    path = Path(t, ν, below, above, up, down, u, z, rows.apply(z))
    return rows.with_units(unit_z, unit_u), path


def most_of(x: Tensor) -> Float[Tensor, "n 1"]:
    """The largest of each sample, 0 of none."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(len(x), 1)


def mean_gap(rows: Rows, path: Path) -> Float[Tensor, "n 1"]:
    """The mean of slack times multiplier."""
    low, high = rows.has_lower, rows.has_upper
    total = (path.up * path.below * low + path.down * path.above * high).sum(-1, keepdim=True)
    return total / (low.sum(-1, keepdim=True) + high.sum(-1, keepdim=True)).clamp_min(1)


def error_of(rows: Rows, path: Path) -> tuple[Float[Tensor, "n L"], Float[Tensor, "n"]]:
    """The size of each row's terms, and what is left of the conditions, relative to it."""
    low, high = rows.has_lower, rows.has_upper
    size = rows.terms(path.z) + torch.where(rows.equal, rows.lower.abs(), 0)
    # Rows whose outputs go to 0 would keep it busy for ever.
    floor = torch.maximum(most_of(size), rows.unit_z) if rows.even else most_of(size)
    size = (size + _LEAST * floor).clamp_min(TINY)
    unit = rows.unit_u + most_of(path.ν.abs())
    equal, lower, upper = residuals_of(rows, path)
    feasible = equal.abs().maximum(lower.abs()).maximum(upper.abs()) / size
    one = torch.minimum(path.below / size, path.up / unit) * low
    other = torch.minimum(path.above / size, path.down / unit) * high
    worst = most_of(feasible.maximum(one).maximum(other)).squeeze(-1)
    return size, worst.nan_to_num(torch.inf)


def residuals_of(rows: Rows, path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Of the equations, and of the two slacks."""
    equal = torch.where(rows.equal, path.r - rows.lower, 0)
    lower = torch.where(rows.has_lower, path.r - rows.lower - path.below, 0)
    return equal, lower, torch.where(rows.has_upper, rows.upper - path.r - path.above, 0)

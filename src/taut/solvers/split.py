"""Rows of G with one entry bound one output: z is clipped there, and the multiplier is known after.

Clipping is exact and needs no place in Newton's system: a box of K rows costs nothing.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.maps import LinearMap
from taut.solvers.sides import Point, Sides


@final
class Box(NamedTuple):
    """Bounds on z that single rows make."""

    floor: Float[Tensor, "n K"]
    ceiling: Float[Tensor, "n K"]
    own_floor: Float[Tensor, "n S"]  # what each row asks for
    own_ceiling: Float[Tensor, "n S"]


@final
@dataclass(frozen=True, eq=False)
class Split:
    """Which rows stay rows, and which bound an output: that of `column`, times `entry`."""

    rest: Int[Tensor, "R"]
    single: Int[Tensor, "S"]
    column: Int[Tensor, "S"]
    entry: Float[Tensor, "S"]

    @staticmethod
    def of(C: LinearMap, equations: int) -> "Split | None":
        """None where no row of G has one entry only, or each sample has rows of its own."""
        if not C.shared:
            return None
        entries = C.over((C.data != 0).to(C.data.dtype))
        single = entries.apply(C.data.new_ones(1, C.shape[1]))[0] == 1
        single[:equations] = False
        if not bool(single.any()):
            return None
        place = single.nonzero().squeeze(-1)
        order = torch.arange(C.shape[1], device=place.device).to(C.data.dtype)
        column = entries.apply(order.unsqueeze(0))[0, place].round().long()
        entry = C.apply(torch.ones_like(order).unsqueeze(0))[0, place]
        return Split((~single).nonzero().squeeze(-1), place, column, entry)

    def box(self, sides: Sides) -> Box:
        """The bounds on z. One at an end of the range or beyond, where z is not, is none."""
        lower, upper = (x[:, self.single] / self.entry for x in (sides.lower, sides.upper))
        own_floor, own_ceiling = (
            torch.where(self.entry > 0, x, y) for x, y in ((lower, upper), (upper, lower))
        )
        least, most = (x.expand(sides.v.shape[-1]) for x in sides.activation.range.bounds(sides.v))
        own_floor = own_floor.masked_fill(own_floor <= least[self.column], -torch.inf)
        own_ceiling = own_ceiling.masked_fill(own_ceiling >= most[self.column], torch.inf)
        column = self.column.expand_as(own_floor)
        none = torch.full_like(sides.v, torch.inf)
        floor = (-none).scatter_reduce(1, column, own_floor, "amax")
        ceiling = none.scatter_reduce(1, column, own_ceiling, "amin")
        return Box(floor, ceiling, own_floor, own_ceiling)

    def within(self, sides: Sides, box: Box) -> Sides:
        """The other rows, with z clipped."""
        C = sides.C.only(self.rest)
        lower, upper = sides.lower[:, self.rest], sides.upper[:, self.rest]
        floor = box.floor if sides.floor is None else torch.maximum(sides.floor, box.floor)
        ceiling = box.ceiling
        if sides.ceiling is not None:
            ceiling = torch.minimum(sides.ceiling, ceiling)
        return Sides(sides.activation, sides.line, C, sides.v, lower, upper, floor, ceiling)

    def whole(self, sides: Sides, box: Box, part: Point) -> Point:
        """With the multipliers of single rows, which are part of u: z = σ(u)."""
        z, u = part.z, part.u
        low, high = z > sides.activation.sigma(u), z < sides.activation.sigma(u)
        low, high = low & (z == box.floor), high & (z == box.ceiling)
        if sides.floor is not None and sides.ceiling is not None:  # held there in any case
            low, high = low & (z > sides.floor), high & (z < sides.ceiling)
        middle = sides.activation.sigma(torch.zeros_like(u))
        there = torch.where(low | high, z, middle)
        pull = sides.activation.inverse(there) - u
        pull = torch.where(low, pull.clamp_min(0), torch.where(high, pull.clamp_max(0), 0))
        own = self._spread(box, pull)
        multipliers = self._joined(part.multipliers, own, sides)
        return part._replace(multipliers=multipliers, u=u + pull, r=sides.C.apply(z))

    def proof(self, sides: Sides, box: Box, multipliers: Tensor, beyond: tuple[Any, ...]) -> Tensor:
        """A proof with the bounds of z as rows: each takes away what Cᵀν has at its output.

        `beyond` says which outputs have a floor above all they may be, or such a ceiling.
        """
        y = sides.C.only(self.rest).adjoint(multipliers)
        above, below = beyond
        empty = (above | below).any(-1, keepdim=True)
        multipliers, y = multipliers.masked_fill(empty, 0), y.masked_fill(empty, 0)
        pull = torch.where((y > 0) & box.ceiling.isfinite() | (y < 0) & box.floor.isfinite(), -y, 0)
        own = self._spread(box, pull)
        own = own + self._spread(box, above.to(y.dtype)) + self._spread(box, -below.to(y.dtype))
        return self._joined(multipliers, own, sides)

    def _spread(self, box: Box, pull: Tensor) -> Float[Tensor, "n S"]:
        """Multipliers that move u by `pull`: of the first row that asks for that bound."""
        at, column = pull[:, self.column], self.column.expand(len(pull), -1)
        floor, ceiling = box.floor[:, self.column], box.ceiling[:, self.column]
        asks = ((at > 0) & (box.own_floor == floor)) | ((at < 0) & (box.own_ceiling == ceiling))
        order = torch.arange(len(self.column), device=at.device).expand_as(at)
        order = order.masked_fill(~asks, len(self.column))
        first = torch.full_like(pull, len(self.column), dtype=torch.long)
        first = first.scatter_reduce(1, column, order, "amin")
        chosen = asks & (first[:, self.column] == order)
        return torch.where(chosen, at / self.entry, 0)

    def _joined(self, rest: Tensor, own: Tensor, sides: Sides) -> Float[Tensor, "n M"]:
        multipliers = torch.zeros_like(sides.lower)
        multipliers[:, self.rest] = rest
        multipliers[:, self.single] = own
        return multipliers

"""Equations that are nearly dependent, beside inequalities: the chain works with orthonormal rows.

A z = b and Q z = T b with Q = T A have the same solutions, and the multipliers of A are Tᵀ those of
Q. Rows of G stay what they are: their signs mean something.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.analysis import Basis
from taut.maps import LinearMap, stacked
from taut.solvers.sides import Sides


@final
@dataclass(frozen=True, eq=False)
class Turned:
    """The basis of the first rows of C, which are those of A."""

    basis: Basis
    A: LinearMap
    equations: int

    @staticmethod
    def of(sides: Sides, basis: Basis, equations: int) -> "Turned | None":
        """None where the equations are far from dependent, or some are redundant."""
        if sides.C.sparse or not basis.transformed or basis.left_out is not None:
            return None
        return Turned(
            basis, sides.C.only(torch.arange(equations, device=sides.v.device)), equations
        )

    def take(self, index: Int[Tensor, "n"]) -> "Turned":
        """That of the samples at `index`."""
        return Turned(self.basis.take(index), self.A.take(index), self.equations)

    def sides(self, sides: Sides) -> Sides:
        """Q in place of A, and T b in place of b."""
        Q, G = self.basis.map.data, sides.C.data[..., self.equations :, :]
        return self._asking(replace(sides, C=stacked(Q, G)), self.basis.restrict(self._b(sides)))

    def corrected(self, turned: Sides, sides: Sides, z: Float[Tensor, "n K"]) -> Sides:
        """`turned`, for which z was found, without what rounding of Q and T b left in A z = b."""
        residual = self.A.excess(z, self._b(sides))
        return self._asking(turned, self._b(turned) - self.basis.restrict(residual))

    def _b(self, sides: Sides) -> Float[Tensor, "n I"]:
        return sides.lower[:, : self.equations]

    def _asking(self, sides: Sides, b: Tensor) -> Sides:
        E = self.equations
        lower, upper = (torch.cat([b, x[:, E:]], -1) for x in (sides.lower, sides.upper))
        return replace(sides, lower=lower, upper=upper)

    def enter(self, multipliers: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
        """Multipliers of Q and G from those of A and G."""
        λ, ν = multipliers[:, : self.equations], multipliers[:, self.equations :]
        return torch.cat([self.basis.enter(self.A, λ), ν], -1)

    def leave(self, multipliers: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
        """Multipliers of A and G from those of Q and G."""
        λ, ν = multipliers[:, : self.equations], multipliers[:, self.equations :]
        return torch.cat([self.basis.leave(λ), ν], -1)

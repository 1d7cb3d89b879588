"""lower ≤ C z ≤ upper, and bounds on z: D, its derivatives, and the derivatives of its solution.

D(ν) = Σ_k φ(v_k + c_kᵀν) − Σ_i (lower_i ν_i⁺ − upper_i ν_i⁻)        convex in ν, kinks at ν_i = 0

C has the rows of A, whose sides are both b, then those of G. ν_i > 0 holds a row at its lower side,
ν_i < 0 at its upper one, and ν_i = 0 says that it is inactive: there the derivatives are those from
the inactive side. Bounds on z need no multipliers: z is clipped, and φ(u) = z u − ψ(z) with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.autograd import lead
from taut.maps import LinearMap
from taut.outcome import Status
from taut.problems.base import Problem
from taut.systems import Known, pull, wide

_NOTHING = torch.empty(0, 0)


@final
@dataclass(frozen=True, eq=False)
class Inequalities(Problem):
    """N samples; `data` holds the numbers of C, of which the first `equations` rows are A's.

    `bounds` are the floor and the ceiling of z, or nothing.
    """

    prepared: Known
    v: Float[Tensor, "N K"]
    data: Tensor
    lower: Float[Tensor, "N M"]
    upper: Float[Tensor, "N M"]
    bounds: tuple[Tensor, ...]  # of z: (N K) each
    equations: int
    start: Float[Tensor, "N M"] | None = None
    group: int = 1

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.v, self.data, self.lower, self.upper, *self.bounds

    @property
    def named(self) -> Mapping[str, Tensor]:
        if not self.bounds:
            names = ("v", "A and G", "b and lower", "b and upper")
            values = (self.v, self.data, _lower(self.lower), _upper(self.upper))
        else:
            names = ("v", "A", "b", "b, as an upper side", "lower", "upper")
            values = (self.v, self.data, self.lower, torch.zeros_like(self.upper))
            values += (_lower(self.bounds[0]), _upper(self.bounds[1]))
        return dict(zip(names, values, strict=True))

    @property
    def C(self) -> LinearMap:
        """C, with the numbers that carry its gradient."""
        return self.prepared.map.over(self.data)

    def over(self, *inputs: Tensor) -> "Inequalities":
        return self.started(None, *inputs)

    def started(self, start: Tensor | None, *inputs: Tensor) -> "Inequalities":
        v, data, lower, upper, *bounds = inputs
        sides = (lower, upper, tuple(bounds))
        return Inequalities(self.prepared, v, data, *sides, self.equations, start, self.group)

    def bare(self) -> "Inequalities":
        return self.over(*(_NOTHING for _ in self.inputs))

    def needed(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(inputs[1:])

    @classmethod
    def restored(cls, prepared: Known, needed: Sequence[Tensor]) -> "Inequalities":
        data, lower, upper, *bounds = needed
        return Inequalities(prepared, _NOTHING, data, lower, upper, tuple(bounds), 0)

    def joined(
        self, inputs: Sequence[Tensor], dims: Sequence[int | None], size: int
    ) -> tuple["Inequalities", tuple[Tensor, ...]]:
        each = [lead(x, d, size) for x, d in zip(inputs, dims, strict=True)]
        C = self.prepared.map.joined(inputs[1], dims[1], size, each[0].shape[1])
        prepared = self.prepared.joined(C, dims[1] is not None, size)
        flat = [x.flatten(0, 1) for x in each]
        return replace(self, prepared=prepared), (flat[0], C.data, *flat[2:])

    def take(self, index: Int[Tensor, "n"]) -> "Inequalities":
        prepared, data = self.prepared, self.data
        if not prepared.map.shared:
            prepared, data = prepared.take(index), data[index]
        return replace(
            self,
            prepared=prepared,
            v=self.v[index],
            data=data,
            lower=self.lower[index],
            upper=self.upper[index],
            bounds=tuple(x[index] for x in self.bounds),
            start=None if self.start is None else self.start[index],
        )

    @property
    def statement(self) -> str:
        return "the constraints"

    def active(self, multipliers: Tensor, u: Tensor, z: Tensor) -> Int[Tensor, "N _"]:
        if self.bounds:
            low, high = self._clipped(u)
            low, high = low & (z <= self.bounds[0]), high & (z >= self.bounds[1])
            return low.to(torch.int8) - high.to(torch.int8)
        return multipliers[..., self.equations :].sign().to(torch.int8)

    def largest_violation(self, z: Float[Tensor, "N K"]) -> Float[Tensor, "N"]:
        """Of every row and bound; not in float32, which has more rounding than violation."""
        dtype, z = z.dtype, z.to(wide(z))
        r, worst = self.prepared.map.over(self.data.to(z.dtype)).apply(z), z.new_zeros(len(z))
        pairs = [(self.lower - r, r - self.upper)]
        if self.bounds:
            pairs.append((self.bounds[0] - z, z - self.bounds[1]))
        for below, above in pairs:
            if below.shape[-1]:
                off = torch.maximum(below, above).amax(-1)
                worst = torch.maximum(worst, off)
        return worst.to(dtype)

    def _clipped(self, u: Tensor) -> tuple[Bool[Tensor, "N K"], Bool[Tensor, "N K"]]:
        """Which outputs are held at their floor, and which at their ceiling."""
        floor, ceiling = self.bounds
        z = self.prepared.activation.sigma(u)
        return z < floor, z > ceiling

    def _sides_of_z(self, u: Tensor) -> tuple[Bool[Tensor, "N K"], Bool[Tensor, "N K"]]:
        """`_clipped` for derivatives: an output with equal bounds is held, by its floor; but not
        one that an infinite u holds at an end of the range."""
        low, high = self._clipped(u)
        fixed = (self.bounds[0] == self.bounds[1]) & ~u.isinf()
        return low | fixed, high & ~fixed

    def output(self, u: Tensor) -> Float[Tensor, "N K"]:
        """z = clip(σ(u)), differentiable in u and in the bounds."""
        held, activation = u.isinf(), self.prepared.activation
        end = activation.sigma(u.detach())
        if not self.bounds:
            return torch.where(held, end, activation.output(torch.where(held, 0, u)))
        low, high = self._sides_of_z(u)
        # σ(u) of a clipped output may overflow, and would then have NaN for a derivative.
        z = activation.output(torch.where(held | low | high, 0, u))
        floor, ceiling = (x.to(z.dtype) for x in self.bounds)
        return torch.where(low, floor, torch.where(high, ceiling, torch.where(held, end, z)))

    def value(self, multipliers: Tensor, u: Tensor) -> Float[Tensor, "N"]:
        activation, held = self.prepared.activation, u.isinf()
        phi = activation.phi(u)
        if self.bounds:
            low, high = self._sides_of_z(u)
            z = self.output(u)
            safe = torch.where(low | high, z, activation.sigma(torch.zeros_like(u)))
            phi = torch.where(low | high, z * u - activation.psi(safe), phi)
        # Held outputs are left out of D, and what they take of the sides with them.
        taken = self.output(u) * self.C.adjoint(multipliers)
        phi = torch.where(held, taken, phi)
        side = torch.where(self._at_lower(multipliers), self.lower, self.upper)
        paid = torch.where(multipliers != 0, side * multipliers, 0)
        return phi.sum(-1) - paid.sum(-1)

    def _at_lower(self, multipliers: Tensor) -> Bool[Tensor, "N M"]:
        return (multipliers > 0) | (self.lower == self.upper)

    def quick_loss(self, y: Tensor, multipliers: Tensor, u: Tensor) -> Float[Tensor, "N"] | None:
        if self.bounds:
            return None
        side = torch.where(self._at_lower(multipliers), self.lower, self.upper)
        side = torch.where(multipliers != 0, side, 0)
        return self.prepared.backend.loss(self.v, side, y, u, multipliers)

    def envelope(
        self, multipliers: Tensor, u: Tensor, z: Tensor, g: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """∂v = z, ∂C = ν zᵀ, ∂lower = −ν⁺, ∂upper = ν⁻, and u − ψ'(z) for the bound of a clipped z.

        Where lower = upper, all goes to lower. With an infinite v, what z takes of the sides is
        all there is: Cᵀν for its bound.
        """
        weighted = g * multipliers
        dC = self.C.outer(weighted, z) if needs[1] else None
        low = self._at_lower(multipliers)
        sides = torch.where(low, -weighted, 0), torch.where(low, 0, -weighted)
        if not self.bounds:
            return g * z, dC, *sides
        low, high = self._sides_of_z(u)
        bound = torch.where(low | high, z, self.prepared.activation.sigma(torch.zeros_like(u)))
        held, inverse = u.isinf(), self.prepared.activation.inverse(bound)
        pull = torch.where(held, 0, u) - inverse
        pull = g * torch.where(held, self.C.adjoint(multipliers), pull)
        return g * z, dC, *sides, torch.where(low, pull, 0), torch.where(high, pull, 0)

    def pullback(
        self,
        multipliers: Tensor,
        u: Tensor,
        status: Tensor,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """With F the active rows, w = σ'(u), 0 where z is clipped, and g = g_u + w∘g_z:

        s_F = H⁻¹(C_F g + g_ν), ∂v = g − w∘C_Fᵀs, ∂side = s, ∂C = ν ∂vᵀ − s zᵀ, and for the bound
        of a clipped output g_z − C_Fᵀs.
        """
        if not (needs[1] or torch.is_grad_enabled()):
            at = multipliers, u, status, grads
            found = self.prepared.backend.pull_within(self, *at, needs)
            if found is not None:
                made, left, count = found
                if count:
                    index = left.nonzero().squeeze(-1)
                    part = [None if g is None else g[index] for g in grads]
                    some = replace(self, lower=self.lower[index], upper=self.upper[index],
                                   bounds=tuple(x[index] for x in self.bounds))  # fmt: skip
                    at = multipliers[index], u[index], status[index], part
                    for x, y in zip(made, some._pulled(*at, needs), strict=True):
                        if x is not None:
                            x.index_copy_(0, index, y)
                return tuple(made)
        return self._pulled(multipliers, u, status, grads, needs)

    def _pulled(
        self, multipliers: Tensor, u: Tensor, status: Tensor, grads: Any, needs: Any
    ) -> tuple[Tensor | None, ...]:
        ok, dtype = (status == Status.CONVERGED).unsqueeze(-1), u.dtype
        held = end = u.isinf()
        if self.bounds:  # z at a bound has the gradient of that bound
            end = held & ~torch.logical_or(*self._clipped(u))
        blank = torch.zeros_like(multipliers, dtype=torch.bool)
        g_z, g_ν, g_u = (
            torch.zeros_like(x, dtype=wide(x))
            if g is None
            else torch.where(ok & ~out, g, 0).to(wide(x))
            for g, x, out in zip(grads, (u, multipliers, u), (end, blank, held), strict=True)
        )
        C, mask = self._finite(), self._active(ok, multipliers)
        ν, u = (torch.where(ok, x, 0).to(wide(x)) for x in (multipliers, u))
        w, z = self._slope(u, held), self.output(u)
        whole = bool(self.bounds) or torch.is_grad_enabled()
        dv, s, t = pull(w, C, mask, g_z, g_u, g_ν, self.prepared, whole)
        dv, s = torch.where(ok, dv, 0), torch.where(ok & mask, s, 0)
        dC = C.outer(ν, dv) - C.outer(s, z) if needs[1] else None
        low = self._at_lower(multipliers)
        found = [dv, dC, torch.where(low, s, 0), torch.where(low, 0, s)]
        if self.bounds:
            low, high = self._sides_of_z(u)
            found += [torch.where(low & ok, t, 0), torch.where(high & ok, t, 0)]
        return tuple(None if x is None else x.to(dtype) for x in found)

    def _active(self, ok: Tensor, multipliers: Tensor) -> Bool[Tensor, "N M"]:
        return ok & ((multipliers != 0) | (self.lower == self.upper))

    def _slope(self, u: Tensor, held: Tensor) -> Float[Tensor, "N K"]:
        if self.bounds:
            low, high = self._sides_of_z(u)
            held = held | low | high
        return torch.where(held, 0, self.prepared.activation.slope(torch.where(held, 0, u)))

    def pushforward(
        self, multipliers: Tensor, u: Tensor, status: Tensor, tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """du = dv + dCᵀν + C_Fᵀdν and dz = w∘du + d(bound) with C_F dz = d(side) − dC z:

        `pull`, with s = −dν.
        """
        ok, dtype, held = (status == Status.CONVERGED).unsqueeze(-1), u.dtype, u.isinf()
        mask, lower = self._active(ok, multipliers), self._at_lower(multipliers)
        ν, u = (torch.where(ok, x, 0).to(wide(x)) for x in (multipliers, u))
        dv, dC, *moved = (None if x is None else x.to(u.dtype) for x in tangents)
        C, z, w = self._finite(), self.output(u), self._slope(u, held)
        du = torch.zeros_like(u) if dv is None else dv
        rhs, jump = torch.zeros_like(ν), torch.zeros_like(u)
        for side, which in zip(moved[:2], (lower, ~lower), strict=True):
            rhs = rhs if side is None else rhs + torch.where(which, side, 0)
        if self.bounds:
            for bound, which in zip(moved[2:], self._sides_of_z(u), strict=True):
                jump = jump if bound is None else jump + torch.where(which, bound, 0)
        if dC is not None:
            change = self.prepared.map.over(dC)
            du, rhs = du + change.adjoint(ν), rhs - change.apply(z)
        du, jump = torch.where(ok & ~held, du, 0), torch.where(ok, jump, 0)
        rhs = torch.where(mask, rhs - C.apply(jump), 0)
        dz, s, du = pull(w, C, mask, du, torch.zeros_like(du), -rhs, self.prepared, True)
        dν, du = torch.where(mask, -s, 0), torch.where(held, 0, du)
        return (dz + jump).to(dtype), dν.to(dtype), du.to(dtype)

    def _finite(self) -> LinearMap:
        """C for derivatives. What is not a number, as only failed samples have it, becomes 0."""
        data = self.data.to(wide(self.data))
        if not self.prepared.finite:
            data = torch.where(data.isfinite(), data, 0)
        return self.prepared.map.over(data)

    @property
    def sides(self) -> tuple[LinearMap, Tensor, Tensor, Tensor, Tensor]:
        ends = tuple(
            x.expand_as(self.v)
            for x in self.prepared.activation.range.bounds(self.v.to(wide(self.v)))
        )
        least, most = ends
        if self.bounds:
            least, most = torch.maximum(least, self.bounds[0]), torch.minimum(most, self.bounds[1])
        return self.C, self.lower, self.upper, least, most


def _lower(side: Tensor) -> Tensor:
    """A lower side without −inf, which says that there is none."""
    return torch.where(side == -torch.inf, 0, side)


def _upper(side: Tensor) -> Tensor:
    """An upper side without inf."""
    return torch.where(side == torch.inf, 0, side)

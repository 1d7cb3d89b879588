"""A z = b: the convex function, its derivatives, and the derivatives of its solution.

D(λ)   = Σ_k φ(v_k + a_kᵀλ) − bᵀλ          convex in λ, one per sample
∇D(λ)  = A z − b,  z = σ(v + Aᵀλ)           the residual of the constraint
∇²D(λ) = A diag(σ'(u)) Aᵀ                   I×I
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.autograd import is_transformed, lead
from taut.maps import LinearMap
from taut.outcome import Status
from taut.problems.base import Problem
from taut.systems import Known, pull, wide

_NOTHING = torch.empty(0, 0)


@final
@dataclass(frozen=True, eq=False)
class Linear(Problem):
    """N samples of A z = b; `data` holds the numbers of A, as its map does."""

    prepared: Known
    v: Float[Tensor, "N K"]
    data: Tensor
    b: Float[Tensor, "N I"]
    start: Float[Tensor, "N I"] | None = None
    group: int = 1

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.v, self.data, self.b

    @property
    def named(self) -> Mapping[str, Tensor]:
        return {"v": self.v, "A": self.data, "b": self.b}

    @property
    def A(self) -> LinearMap:
        """A, with the numbers that carry its gradient."""
        return self.prepared.map.over(self.data)

    def over(self, *inputs: Tensor) -> "Linear":
        v, data, b = inputs
        return Linear(self.prepared, v, data, b)

    def started(self, start: Tensor | None, *inputs: Tensor) -> "Linear":
        v, data, b = inputs
        return Linear(self.prepared, v, data, b, start, self.group)

    def bare(self) -> "Linear":
        return Linear(self.prepared, _NOTHING, _NOTHING, _NOTHING)

    def needed(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (inputs[1],)

    @classmethod
    def restored(cls, prepared: Known, needed: Sequence[Tensor]) -> "Linear":
        return Linear(prepared, _NOTHING, needed[0], _NOTHING)

    def joined(
        self, inputs: Sequence[Tensor], dims: Sequence[int | None], size: int
    ) -> tuple["Linear", tuple[Tensor, ...]]:
        v, data, b = inputs
        v, b = lead(v, dims[0], size), lead(b, dims[2], size)
        A = self.prepared.map.joined(data, dims[1], size, v.shape[1])
        prepared = self.prepared.joined(A, dims[1] is not None, size)
        return replace(self, prepared=prepared), (v.flatten(0, 1), A.data, b.flatten(0, 1))

    def take(self, index: Int[Tensor, "n"]) -> "Linear":
        prepared, data = self.prepared, self.data
        if not prepared.map.shared:
            prepared, data = prepared.take(index), data[index]
        start = None if self.start is None else self.start[index]
        return replace(
            self, prepared=prepared, v=self.v[index], data=data, b=self.b[index], start=start
        )

    @property
    def sides(self) -> tuple[LinearMap, Tensor, Tensor, Tensor, Tensor]:
        least, most = (
            x.expand_as(self.v)
            for x in self.prepared.activation.range.bounds(self.v.to(wide(self.v)))
        )
        return self.A, self.b, self.b, least, most

    def residual(self, z: Float[Tensor, "N K"]) -> Float[Tensor, "N I"]:
        """A z − b: the gradient of D where z = σ(v + Aᵀλ)."""
        return self.A.excess(z, self.b)

    def value(self, multipliers: Tensor, u: Tensor) -> Float[Tensor, "N"]:
        phi, held = self.prepared.activation.phi(u), u.isinf()
        if bool(held.any()):
            # They are left out of D, and what they take of b with them: b − Σ a_k z_k.
            taken = self.prepared.activation.sigma(u) * self.A.adjoint(multipliers)
            phi = torch.where(held, taken, phi)
        return phi.sum(-1) - (self.b * multipliers).sum(-1)

    def quick_loss(self, y: Tensor, multipliers: Tensor, u: Tensor) -> Float[Tensor, "N"] | None:
        return self.prepared.backend.loss(self.v, self.b, y, u, multipliers)

    def envelope(
        self, multipliers: Tensor, u: Tensor, z: Tensor, g: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """∂v = z, ∂A = λ zᵀ, ∂b = −λ."""
        weighted = g * multipliers
        dA = self.A.outer(weighted, z) if needs[1] else None
        return g * z, dA, -weighted if needs[2] else None

    def pullback(
        self,
        multipliers: Tensor,
        u: Tensor,
        status: Tensor,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """With w = σ'(u), H = A diag(w) Aᵀ and g = g_u + w∘g_z:

        s = H⁻¹(A g + g_λ),  ∂v = g − w∘Aᵀs,  ∂b = s,  ∂A = λ ∂vᵀ − s zᵀ.
        """
        if not (needs[1] or torch.is_grad_enabled()):
            found = self.prepared.backend.pullback(u, status, grads)
            if found is not None:
                dv, db, left = found
                if left:
                    index = db.isnan().any(-1).nonzero().squeeze(-1)
                    part = [None if g is None else g[index] for g in grads]
                    rest = self._pulled(multipliers[index], u[index], status[index], part, needs)
                    dv.index_copy_(0, index, rest[0])
                    db.index_copy_(0, index, rest[2])
                return dv, None, db
        return self._pulled(multipliers, u, status, grads, needs)

    def _pulled(
        self, multipliers: Tensor, u: Tensor, status: Tensor, grads: Any, needs: Any
    ) -> Any:
        # A failed sample has zero gradient, and nothing of it may reach its neighbours.
        ok, dtype, held = (status == Status.CONVERGED).unsqueeze(-1), u.dtype, _held(u)
        free = ok if held is None else ok & ~held
        g_z, g_multipliers, g_u = (
            torch.zeros_like(x, dtype=wide(x)) if g is None else torch.where(own, g, 0).to(wide(x))
            for g, x, own in zip(grads, (u, multipliers, u), (free, ok, free), strict=True)
        )
        multipliers, u = (torch.where(ok, x, 0).to(wide(x)) for x in (multipliers, u))
        A, (w, z) = self._finite(), self._local(u, held)
        whole = torch.is_grad_enabled()
        dv, s, _ = pull(w, A, None, g_z, g_u, g_multipliers, self.prepared, whole)
        dA = A.outer(multipliers, dv) - A.outer(s, z) if needs[1] else None
        return dv.to(dtype), None if dA is None else dA.to(self.data.dtype), s.to(dtype)

    def _local(self, u: Tensor, held: Tensor | None) -> tuple[Tensor, Tensor]:
        """σ'(u), which is 0 where an output is held at an end, and z."""
        activation = self.prepared.activation
        if held is None:
            return activation.slope(u), activation.output(u)
        free = torch.where(held, 0, u)
        w = torch.where(held, 0, activation.slope(free))
        return w, torch.where(held, activation.sigma(u.detach()), activation.output(free))

    def pushforward(
        self, multipliers: Tensor, u: Tensor, status: Tensor, tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """du = dv + dAᵀλ + Aᵀdλ and dz = w∘du with A dz = db − dA z: `pull`, with s = −dλ."""
        ok = (status == Status.CONVERGED).unsqueeze(-1)
        dv, dA, db = tangents
        dtype = u.dtype
        multipliers, u = (torch.where(ok, x, 0).to(wide(x)) for x in (multipliers, u))
        held = _held(u)
        A, (w, z) = self._finite(), self._local(u, held)
        du = torch.zeros_like(u) if dv is None else dv.to(u.dtype)
        rhs = torch.zeros_like(multipliers) if db is None else db.to(u.dtype)
        if dA is not None:
            change = self.prepared.map.over(dA.to(u.dtype))
            du, rhs = du + change.adjoint(multipliers), rhs - change.apply(z)
        free = ok if held is None else ok & ~held
        du, rhs = torch.where(free, du, 0), torch.where(ok, rhs, 0)
        dz, s, du = pull(w, A, None, du, torch.zeros_like(du), -rhs, self.prepared, True)
        du = du if held is None else torch.where(held, 0, du)
        return dz.to(dtype), torch.where(ok, -s, 0).to(dtype), du.to(dtype)

    def _finite(self) -> LinearMap:
        """A for derivatives. What is not a number, as only failed samples have it, becomes 0."""
        data = self.data.to(wide(self.data))
        if not self.prepared.finite:
            data = torch.where(data.isfinite(), data, 0)
        return self.prepared.map.over(data)


def _held(u: Tensor) -> Tensor | None:
    """Which outputs are at an end of their range; None where none is, and one may look."""
    held = u.isinf()
    return held if is_transformed(u) or bool(held.any()) else None

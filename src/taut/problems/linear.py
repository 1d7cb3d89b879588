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
from taut.maps import BatchedMap, LinearMap
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
        held = u.isinf()
        if is_transformed(u):  # nobody may look: the slope, which is 0 there, says enough
            g_u = None if grads[2] is None else grads[2].masked_fill(held, 0)
            return self._pulled_free(multipliers, u, status, (*grads[:2], g_u), needs)
        if not bool(held.any()):
            return self._pulled_free(multipliers, u, status, grads, needs)
        # Not rounded to float32 before ∂A is made of them.
        dv, s = (torch.zeros_like(x, dtype=wide(x)) for x in (u, multipliers))
        for index, part in self._apart(held):
            out = held[index]
            g_z, g_multipliers, g_u = (None if g is None else g[index] for g in grads)
            g_z, g_u = (None if g is None else g.masked_fill(out, 0) for g in (g_z, g_u))
            free, given = u[index].masked_fill(out, 0).to(wide(u)), (g_z, g_multipliers, g_u)
            at = multipliers[index].to(wide(u)), free, status[index]
            found = part._pulled_free(*at, given, (True, False, True))
            dv, s = dv.index_copy(0, index, found[0]), s.index_copy(0, index, found[2])
        dtype = u.dtype
        if not needs[1]:
            return dv.to(dtype), None, s.to(dtype)
        ok = (status == Status.CONVERGED).unsqueeze(-1)
        z = torch.where(ok, self.prepared.activation.output(u.to(wide(u))), 0)
        A, multipliers = self._finite(), torch.where(ok, multipliers, 0).to(wide(u))
        dA = A.outer(multipliers, dv) - A.outer(s, z)
        return dv.to(dtype), dA.to(self.data.dtype), s.to(dtype)

    def _apart(self, held: Tensor) -> list[tuple[Tensor, "Linear"]]:
        """The samples without held outputs, and those with some, which then have an A without
        them; with their places in the batch."""
        some = held.any(-1)
        index, rest = some.nonzero().squeeze(-1), (~some).nonzero().squeeze(-1)
        A = self._finite()
        each = A.take(index).dense() * (~held[index]).unsqueeze(-2)
        reduced = self.prepared.anew(BatchedMap(each))
        parts = [(index, Linear(reduced, _NOTHING, each, _NOTHING))]
        if len(rest):
            plain = self.prepared if A.shared else self.prepared.take(rest)
            parts.append((rest, Linear(plain, _NOTHING, A.take(rest).data, _NOTHING)))
        return parts

    def _pulled_free(
        self, multipliers: Tensor, u: Tensor, status: Tensor, grads: Any, needs: Any
    ) -> Any:
        # A failed sample has zero gradient, and nothing of it may reach its neighbours.
        ok, dtype = (status == Status.CONVERGED).unsqueeze(-1), u.dtype
        g_z, g_multipliers, g_u = (
            torch.zeros_like(x, dtype=wide(x)) if g is None else torch.where(ok, g, 0).to(wide(x))
            for g, x in zip(grads, (u, multipliers, u), strict=True)
        )
        multipliers, u = (torch.where(ok, x, 0).to(wide(x)) for x in (multipliers, u))
        A, activation = self._finite(), self.prepared.activation
        w, z = activation.slope(u), activation.output(u)
        whole = torch.is_grad_enabled()
        dv, s, _ = pull(w, A, None, g_z, g_u, g_multipliers, self.prepared, whole)
        dA = A.outer(multipliers, dv) - A.outer(s, z) if needs[1] else None
        return dv.to(dtype), None if dA is None else dA.to(self.data.dtype), s.to(dtype)

    def pushforward(
        self, multipliers: Tensor, u: Tensor, status: Tensor, tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """du = dv + dAᵀλ + Aᵀdλ and dz = w∘du with A dz = db − dA z: `pull`, with s = −dλ."""
        ok = (status == Status.CONVERGED).unsqueeze(-1)
        dv, dA, db = tangents
        dtype = u.dtype
        multipliers, u = (torch.where(ok, x, 0).to(wide(x)) for x in (multipliers, u))
        z = self.prepared.activation.output(u)
        du = torch.zeros_like(u) if dv is None else dv.to(u.dtype)
        rhs = torch.zeros_like(multipliers) if db is None else db.to(u.dtype)
        if dA is not None:
            change = self.prepared.map.over(dA.to(u.dtype))
            du, rhs = du + change.adjoint(multipliers), rhs - change.apply(z)
        held = u.isinf()
        du, rhs = torch.where(ok & ~held, du, 0), torch.where(ok, rhs, 0)
        if is_transformed(u) or not bool(held.any()):
            moves = self._pushed_free(u, ok, du, rhs)
        else:
            moves = torch.zeros_like(u), torch.zeros_like(multipliers), torch.zeros_like(u)
            for index, part in self._apart(held):
                free = u[index].masked_fill(held[index], 0)
                found = part._pushed_free(free, ok[index], du[index], rhs[index])
                pairs = zip(moves, found, strict=True)
                moves = tuple(x.index_copy(0, index, y) for x, y in pairs)
        dz, moved, du = (x.to(dtype) for x in moves)
        return dz, moved, du

    def _pushed_free(self, u: Tensor, ok: Tensor, du: Tensor, rhs: Tensor) -> tuple[Tensor, ...]:
        A, w = self._finite(), self.prepared.activation.slope(u)
        dz, s, du = pull(w, A, None, du, torch.zeros_like(du), -rhs, self.prepared, True)
        return dz, torch.where(ok, -s, 0), du

    def _finite(self) -> LinearMap:
        """A for derivatives. What is not a number, as only failed samples have it, becomes 0."""
        data = self.data.to(wide(self.data))
        if not self.prepared.finite:
            data = torch.where(data.isfinite(), data, 0)
        return self.prepared.map.over(data)

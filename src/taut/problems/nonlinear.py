"""A z = b and h(z, *params) = 0: the derivatives of a solution, and what the matched loss needs.

With c(z) = [A z − b; h(z)], J = c'(z), S = Σ λ_i ∇²h_i, w = σ'(u), r = √w, J̃ = J diag(r):

z = σ(u),  u = v + J(z)ᵀλ,  c(z) = 0          B(z‖σ(v)) is stationary on {c = 0}
H = I − diag(r) S diag(r)                     positive on the null space of J̃: a strict minimum

J depends on z, so λ has weights that depend on the output, and S is what is new beside A z = b.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.autograd import (
    forward_mode,
    is_transformed,
    lead,
    outside_inference,
    without_hooks,
)
from taut.maps import LinearMap, as_map
from taut.outcome import Status
from taut.problems.base import Problem
from taut.problems.curved import check_closure, count_equations
from taut.problems.linear import Linear
from taut.problems.surface import Surface, curvature, jacobian, pulled
from taut.systems import Known, wide
from taut.systems.saddle import back, bordered, hessian, times

_NOTHING = torch.empty(0, 0)


@final
class _Local(NamedTuple):
    """All that derivatives need of a solution, in float64."""

    z: Float[Tensor, "N K"]
    r: Float[Tensor, "N K"]
    J: Float[Tensor, "N rows K"]
    S: Float[Tensor, "N K K"]
    multipliers: Float[Tensor, "N rows"]
    params: tuple[Tensor, ...]

    def solve(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """H x + J̃ᵀs = a, J̃ x = c."""
        return bordered(hessian(self.S, self.r), self.J * self.r.unsqueeze(-2), a, c)


@final
@dataclass(frozen=True, eq=False)
class Nonlinear(Problem):
    """N samples; `data` holds the numbers of A, and h is that of `prepared`.

    `start` has the multipliers of A and h in its columns, or u and then these.
    """

    prepared: Known
    v: Float[Tensor, "N K"]
    data: Tensor
    b: Float[Tensor, "N I"]
    params: tuple[Tensor, ...]
    start: Float[Tensor, "N _"] | None = None
    group: int = 1

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.v, self.data, self.b, *self.params

    @property
    def named(self) -> Mapping[str, Tensor]:
        own = {f"params[{i}]": p for i, p in enumerate(self.params)}
        return {"v": self.v, "A": self.data, "b": self.b, **own}

    @property
    def h(self) -> Any:
        return self.prepared.h

    @property
    def A(self) -> LinearMap:
        """A, with the numbers that carry its gradient."""
        return self.prepared.map.over(self.data)

    @cached_property
    def units(self) -> int:
        """How many multipliers a sample has; h is looked at for that."""
        with outside_inference(), without_hooks():
            v = self.v.detach().to(wide(self.v)).nan_to_num(0.0, 0.0, 0.0)
            z = self.prepared.activation.sigma(v).clone()
            params = tuple(p.detach().to(z.dtype).clone() for p in self.params)
            return self.b.shape[-1] + count_equations(self.h, z, params)

    def check_closure(self) -> None:
        """Refuse an h that closes over what a transform follows. Inside a solve nobody sees it."""
        like = {"dtype": wide(self.v), "device": self.v.device}
        z = self.prepared.activation.sigma(torch.zeros(1, self.v.shape[-1], **like))
        check_closure(self.h, z, [torch.ones(1, *p.shape[1:], **like) for p in self.params])

    @property
    def statement(self) -> str:
        return "A z = b and h(z) = 0" if self.b.shape[-1] else "h(z) = 0"

    @property
    def derived(self) -> str:
        return "h, or a derivative of it, is not, wherever it was tried"

    def remark(self, verdict: Status, sample: int) -> str:
        if verdict is Status.MAX_ITERATIONS:
            return (
                " With h the search is local and every failure undecided: also try a start near a "
                "solution, init=(u, multipliers)."
            )
        return super().remark(verdict, sample)

    def over(self, *inputs: Tensor) -> "Nonlinear":
        v, data, b, *params = inputs
        return Nonlinear(self.prepared, v, data, b, tuple(params))

    def started(self, start: Tensor | None, *inputs: Tensor) -> "Nonlinear":
        return replace(self.over(*inputs), start=start, group=self.group)

    def bare(self) -> "Nonlinear":
        return self.over(*(_NOTHING for _ in self.inputs))

    def needed(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return inputs[1], *inputs[3:]

    @classmethod
    def restored(cls, prepared: Known, needed: Sequence[Tensor]) -> "Nonlinear":
        data, *params = needed
        return Nonlinear(prepared, _NOTHING, data, _NOTHING, tuple(params))

    def joined(
        self, inputs: Sequence[Tensor], dims: Sequence[int | None], size: int
    ) -> tuple["Nonlinear", tuple[Tensor, ...]]:
        alone = Linear(self.prepared, _NOTHING, _NOTHING, _NOTHING)
        alone, (v, data, b) = alone.joined(inputs[:3], dims[:3], size)
        params = [lead(p, d, size).flatten(0, 1) for p, d in zip(inputs[3:], dims[3:], strict=True)]
        return replace(self, prepared=alone.prepared), (v, data, b, *params)

    def take(self, index: Int[Tensor, "n"]) -> "Nonlinear":
        prepared, data = self.prepared, self.data
        if not prepared.map.shared:
            prepared, data = prepared.take(index), data[index]
        params = tuple(p[index] for p in self.params)
        start = None if self.start is None else self.start[index]
        v, b = self.v[index], self.b[index]
        return replace(self, prepared=prepared, v=v, data=data, b=b, params=params, start=start)

    def equations(self) -> Linear:
        """A z = b alone."""
        prepared = getattr(self.prepared, "alone", None) or self.prepared
        return Linear(prepared, self.v, self.data, self.b)

    @property
    def sides(self) -> tuple[LinearMap, Tensor, Tensor, Tensor, Tensor]:
        """Those of A; h has rows of zeros, which prove nothing."""
        A = self.A.dense()
        more = self.units - A.shape[-2]
        A = torch.cat([A, A.new_zeros(*A.shape[:-2], more, A.shape[-1])], -2)
        b = torch.nn.functional.pad(self.b, (0, more))
        least, most = (x.expand_as(self.v) for x in self.prepared.activation.range.bounds(self.v))
        return as_map(A), b, b, least, most

    def surface(self) -> Surface:
        """c, in float64."""
        dtype = wide(self.v)
        params = tuple(p.detach().to(dtype) for p in self.params)
        A, b = self._dense().detach(), self.b.detach().to(dtype)
        return Surface(self.h, params, A, b)

    def _dense(self) -> Tensor:
        """A in float64. What is not a number, as only failed samples have it, becomes 0."""
        A = self.A.dense()
        A = A.to(wide(A))
        return A if self.prepared.finite else torch.where(A.isfinite(), A, 0)

    def value(self, multipliers: Tensor, u: Tensor) -> Float[Tensor, "N"]:
        """vᵀz − Σψ(z) + λᵀc(z) = Σφ(u) − zᵀ(u − v) + λᵀc(z), without held outputs.

        λᵀc is 0 where the sample has converged; what held outputs take of c stays in it.
        """
        activation, held = self.prepared.activation, u.isinf()
        z = activation.sigma(u).to(wide(u))
        free = torch.where(held, 0, u).to(z.dtype)
        v = torch.where(held, 0, self.v).to(z.dtype)
        terms = torch.where(held, 0, activation.phi(free) - z * (free - v))
        c = self.surface().value(z)
        paid = torch.where(multipliers == 0, 0, multipliers.to(z.dtype) * c)
        return (terms.sum(-1) + paid.sum(-1)).to(u.dtype)

    def envelope(
        self, multipliers: Tensor, u: Tensor, z: Tensor, g: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """∂v = z, ∂A = λ_A zᵀ, ∂b = −λ_A, ∂θ = (∂h/∂θ)ᵀλ_h."""
        equations = self.data_rows
        weighted = g * multipliers
        linear, own = weighted[:, :equations], weighted[:, equations:]
        dA = self.A.outer(linear, z) if needs[1] else None
        moved: tuple[Tensor | None, ...] = (None,) * len(self.params)
        if any(needs[3:]):
            at, own = z.to(wide(z)), own.to(wide(z))
            params = tuple(p.to(at.dtype) for p in self.params)
            found = torch.func.vjp(lambda *p: self.h(at, *p), *params)[1](own)
            moved = self._cast(found)
        return g * z, dA, -linear if needs[2] else None, *moved

    @property
    def data_rows(self) -> int:
        """How many equations A has."""
        return self.prepared.map.shape[0]

    def _cast(self, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(x.to(p.dtype) for x, p in zip(found, self.params, strict=True))

    def pullback(
        self,
        multipliers: Tensor,
        u: Tensor,
        status: Tensor,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """H p̂ + J̃ᵀq = r∘(g_z + S g_u) and J̃ p̂ = −g_λ − J g_u, p = g_u + r∘p̂:

        ∂v = p, ∂b = q_A, ∂A = λ_A pᵀ − q_A zᵀ, ∂θ = ∂/∂θ [pᵀJ(z; θ)ᵀλ_h − q_hᵀh(z; θ)].
        """
        ok, dtype, held = (status == Status.CONVERGED).unsqueeze(-1), u.dtype, u.isinf()
        at, higher = self._local(multipliers, u, ok)
        blank = torch.zeros_like(multipliers, dtype=torch.bool)
        g_z, g_λ, g_u = (
            torch.zeros_like(x, dtype=wide(x))
            if g is None
            else torch.where(ok & ~out, g, 0).to(wide(x))
            for g, x, out in zip(grads, (u, multipliers, u), (held, blank, held), strict=True)
        )
        x, q = at.solve(at.r * (g_z + times(at.S, g_u)), -g_λ - times(at.J, g_u))
        p, q = torch.where(ok, g_u + at.r * x, 0), torch.where(ok, q, 0)
        equations = self.data_rows
        linear, own = q[:, :equations], q[:, equations:]
        dA = None
        if needs[1]:
            A = self.A.over(self.data.to(p.dtype))
            dA = A.outer(torch.where(ok, at.multipliers[:, :equations], 0), p)
            dA = (dA - A.outer(linear, torch.where(ok, at.z, 0))).to(self.data.dtype)
        moved: tuple[Tensor | None, ...] = (None,) * len(self.params)
        if any(needs[3:]):
            moved = self._pulled_params(at, p, own, higher)
        return p.to(dtype), dA, linear.to(dtype), *moved

    def _pulled_params(self, at: _Local, p: Tensor, q: Tensor, higher: bool) -> tuple[Tensor, ...]:
        """∂θ at fixed z, λ, p and q. Of u and λ, which depend on θ too, nobody asks here."""
        own = at.multipliers[:, self.data_rows :]
        if higher:

            def both(*params: Tensor) -> tuple[Tensor, Tensor]:
                return pulled(self.h, at.z, params, own), self.h(at.z, *params)

            return self._cast(torch.func.vjp(both, *at.params)[1]((p, -q)))
        with torch.enable_grad(), without_hooks():
            params = tuple(x.detach().requires_grad_() for x in at.params)
            z = at.z.detach().requires_grad_()
            h = self.h(z, *params)
            (gradient,) = torch.autograd.grad(h, z, own, create_graph=True)
            total = (gradient * p).sum() - (h * q).sum()
            found = torch.autograd.grad(total, params, allow_unused=True, materialize_grads=True)
        return self._cast(found)

    def _local(self, multipliers: Tensor, u: Tensor, ok: Tensor) -> tuple[_Local, bool]:
        """The solution as derivatives see it, and whether these will be differentiated themselves.

        A failed sample is replaced by one that has converged: nothing of it may reach its
        neighbours, and h may not be defined there.
        """
        higher = torch.is_grad_enabled() or is_transformed(u) or forward_mode()

        def only(x: Tensor, good: Tensor) -> Tensor:
            here = ok.reshape(-1, *(1 for _ in x.shape[1:]))
            return torch.where(here, x, x.index_select(0, good)).to(wide(x))

        if len(u) and (is_transformed(u) or not bool(ok.all())):
            good = ok.squeeze(-1).long().argmax(0, keepdim=True)
            multipliers, u, *params = (only(x, good) for x in (multipliers, u, *self.params))
        else:
            multipliers, u, *params = (x.to(wide(x)) for x in (multipliers, u, *self.params))
        held, activation = u.isinf(), self.prepared.activation
        free = torch.where(held, 0, u)
        w = torch.where(held, 0, activation.slope(free))
        # Not √0, whose derivative is infinite: such an output moves nothing.
        r = torch.where(w > 0, torch.where(w > 0, w, 1).sqrt(), 0)
        z = torch.where(held, activation.sigma(u.detach()), activation.output(free))
        A, own = self._dense(), multipliers[:, self.data_rows :]
        if higher:
            J, S = jacobian(self.h, z, params), curvature(self.h, z, params, own)
            A = A.expand(len(z), *A.shape[-2:])
            return _Local(z, r, torch.cat([A, J], -2), S, multipliers, tuple(params)), True
        linear = z.new_zeros(len(z), self.data_rows)
        with without_hooks():
            patch = Surface(self.h, tuple(params), A.detach(), linear).at(z)
            J, S = patch.jacobian(), patch.curvature(own)
        S = z.new_zeros(*z.shape, z.shape[-1]) if S is None else S
        return _Local(z, r, J, S, multipliers, tuple(params)), False

    def pushforward(
        self, multipliers: Tensor, u: Tensor, status: Tensor, tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With a = dv + dAᵀλ_A + d(Jᵀλ_h) and k = dA z − db + dh, both at fixed z and λ:

        H y + J̃ᵀ(−dλ) = r∘a and J̃ y = −k; dz = r∘y, du = a + S dz + Jᵀdλ.
        """
        ok, dtype = (status == Status.CONVERGED).unsqueeze(-1), u.dtype
        free = ok & ~u.isinf()
        at, _ = self._local(multipliers, u, ok)
        dv, dA, db, *moved = (None if x is None else x.to(at.z.dtype) for x in tangents)
        equations = self.data_rows
        linear, own = at.multipliers[:, :equations], at.multipliers[:, equations:]
        a = torch.zeros_like(at.z) if dv is None else dv
        k = torch.zeros_like(linear) if db is None else -db
        if dA is not None:
            change = self.prepared.map.over(dA)
            a, k = a + change.adjoint(linear), k + change.apply(at.z)
        turned, raised = self._pushed_params(at, own, moved)
        a, k = torch.where(free, a + turned, 0), torch.cat([k, raised], -1)
        y, s = at.solve(at.r * a, torch.where(ok, -k, 0))
        dz = torch.where(ok, at.r * y, 0)
        dλ = torch.where(ok, -s, 0)
        du = torch.where(free, a + times(at.S, dz) + back(at.J, dλ), 0)
        return dz.to(dtype), dλ.to(dtype), du.to(dtype)

    def _pushed_params(
        self, at: _Local, own: Tensor, moved: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """d(Jᵀλ) and dh from dθ. By two pullbacks: forward mode does not nest everywhere."""
        changes = [
            torch.zeros_like(p) if x is None else x for x, p in zip(moved, at.params, strict=True)
        ]

        def gain(p: Tensor, q: Tensor) -> Tensor:
            def both(*params: Tensor) -> tuple[Tensor, Tensor]:
                return pulled(self.h, at.z, params, own), self.h(at.z, *params)

            found = torch.func.vjp(both, *at.params)[1]((p, q))
            return sum(((x * y).sum() for x, y in zip(found, changes, strict=True)), p.sum() * 0)

        zero = torch.zeros_like(at.z), torch.zeros_like(own)
        value, pull, *_ = torch.func.vjp(gain, *zero)
        return pull(torch.ones_like(value))

"""The linear system of nonlinear equations: a Hessian bordered by a Jacobian, sample by sample.

    [[H, J̃ᵀ], [J̃, 0]] [x; s] = [a; c],   H = I − diag(r) S diag(r),  J̃ = J diag(r),  r = √σ'(u)

`Saddle` is factorised for the steps of a solver, `bordered` is for derivatives of any order.
`is_minimum` asks whether H is positive where J̃ is 0: then the point is a strict minimum among its
neighbours.
"""

from typing import Any, NamedTuple, cast, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import Function

from taut.autograd import apply_mapped, lead

# A pivot of Cholesky, in equations of length 1, below which one of them follows from the others;
# then the diagonal is lifted by `_LIFT`, a hundred times as much at each attempt.
_DEPENDENT, _LIFT, _HIGHEST = 1e-6, 4e-11, 1e9
# Margins of "positive": the centre of a sphere has H = 0 up to rounding.
_MARGIN, _WEIGHT, _PIVOT = 1e-6, 1e3, 1e-5
_SINGULAR = 1e-11  # part of the largest pivot, or eigenvalue, that is none


def times(M: Float[Tensor, "n i k"], x: Float[Tensor, "n k"]) -> Float[Tensor, "n i"]:
    """M x, sample by sample."""
    return torch.matmul(M, x.unsqueeze(-1)).squeeze(-1)


def back(M: Float[Tensor, "n i k"], x: Float[Tensor, "n i"]) -> Float[Tensor, "n k"]:
    """Mᵀx, sample by sample."""
    return torch.matmul(x.unsqueeze(-2), M).squeeze(-2)


def length(x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """|x|, sample by sample."""
    return torch.linalg.vector_norm(x, dim=-1)


def diagonal(M: Float[Tensor, "*n k k"]) -> Float[Tensor, "*n k"]:
    """The diagonal, as a view."""
    return M.diagonal(dim1=-2, dim2=-1)


def hessian(S: Float[Tensor, "*n k k"], r: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k k"]:
    """H = I − diag(r) S diag(r)."""
    H = S * -(r.unsqueeze(-1) * r.unsqueeze(-2))
    diagonal(H).add_(1)
    return H


@final
class Saddle(NamedTuple):
    """[[H, −J̃ᵀ], [J̃, 0]], factorised."""

    LU: Float[Tensor, "n m m"]
    pivots: Tensor
    fine: Bool[Tensor, "n"]
    S: Float[Tensor, "n k k"] | None
    r: Float[Tensor, "n k"]

    @staticmethod
    def of(J: Tensor, r: Tensor, S: Tensor | None) -> "Saddle":
        n, rows, outputs = J.shape
        T = J.new_zeros(n, outputs + rows, outputs + rows)
        if S is not None:
            T[:, :outputs, :outputs] = S * -(r.unsqueeze(-1) * r.unsqueeze(-2))
        diagonal(T[:, :outputs, :outputs]).add_(1)
        scaled = J * r.unsqueeze(-2)
        T[:, outputs:, :outputs] = scaled
        T[:, :outputs, outputs:] = -scaled.mT
        LU, pivots, info = torch.linalg.lu_factor_ex(T)
        return Saddle(LU, pivots, info == 0, S, r)

    def solve(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, s, and S(r∘x)."""
        rhs = torch.cat([a, c], -1).unsqueeze(-1)
        found = torch.linalg.lu_solve(self.LU, self.pivots, rhs).squeeze(-1)
        outputs = a.shape[-1]
        x, s = found[:, :outputs], found[:, outputs:]
        return x, s, None if self.S is None else times(self.S, self.r * x)


@final
class Rows(NamedTuple):
    """J̃J̃ᵀ as d⁻¹LLᵀd⁻¹, by Cholesky; lifted by the least that will do where rows are dependent."""

    L: Float[Tensor, "n i i"]
    d: Float[Tensor, "n i"]

    @staticmethod
    def of(G: Float[Tensor, "n i i"]) -> "Rows":
        d = diagonal(G).clamp_min(1e-300).rsqrt()
        unit = G * d.unsqueeze(-1) * d.unsqueeze(-2)
        L, info = torch.linalg.cholesky_ex(unit)
        if G.shape[-1] == 0:
            return Rows(L, d)
        bad = (info != 0) | ~(diagonal(L).amin(-1) > _DEPENDENT)
        index, lift = bad.nonzero().squeeze(-1), _LIFT
        rest = unit[index].nan_to_num(0.0, 0.0, 0.0)
        while len(index) and lift < _HIGHEST:
            raised = rest.clone()
            diagonal(raised).fill_(1 + lift)
            found, info = torch.linalg.cholesky_ex(raised)
            good = info == 0
            L[index[good]] = found[good]
            index, rest, lift = index[~good], rest[~good], 100 * lift
        return Rows(L, d)

    def solve(self, x: Float[Tensor, "n i"]) -> Float[Tensor, "n i"]:
        """(J̃J̃ᵀ)⁻¹x."""
        return self.d * torch.cholesky_solve((self.d * x).unsqueeze(-1), self.L).squeeze(-1)

    def projector(self, J: Float[Tensor, "n i k"]) -> Float[Tensor, "n k k"]:
        """P = I − J̃ᵀ(J̃J̃ᵀ)⁻¹J̃: onto the directions along the surface."""
        W = torch.linalg.solve_triangular(self.L, J * self.d.unsqueeze(-1), upper=False)
        P = -(W.mT @ W)
        diagonal(P).add_(1)
        return P


def is_minimum(J: Tensor, r: Tensor, S: Tensor | None) -> Bool[Tensor, "n"]:
    """Is H positive on the null space of J̃, with a margin? True proves a strict local minimum."""
    if S is None:
        return torch.ones(len(J), dtype=torch.bool, device=J.device)
    scaled = J * r.unsqueeze(-2)
    unit = scaled / length(scaled).unsqueeze(-1).clamp_min(1e-300)
    H = hessian(S, r)
    diagonal(H).sub_(_MARGIN)
    # H + ρJ̃ᵀJ̃ > 0 implies H > 0 on the null space, whatever ρ.
    whole = torch.baddbmm(H, unit.mT, unit, alpha=_WEIGHT)
    ok = (torch.linalg.cholesky_ex(whole.nan_to_num(0.0, 0.0, 0.0)).info == 0) & _finite(whole)
    index = (~ok).nonzero().squeeze(-1)
    if len(index):
        scaled, S, r = scaled[index], S[index], r[index]
        P = Rows.of(scaled @ scaled.mT).projector(scaled)
        R = -(P @ (S * (r.unsqueeze(-1) * r.unsqueeze(-2))) @ P)
        diagonal(R).add_(1)
        L, info = torch.linalg.cholesky_ex(R.nan_to_num(0.0, 0.0, 0.0))
        ok[index] = (info == 0) & (diagonal(L).amin(-1) > _PIVOT) & _finite(R)
    return ok


def _finite(M: Tensor) -> Bool[Tensor, "n"]:
    return M.isfinite().flatten(1).all(-1)


def bordered(
    H: Float[Tensor, "*n k k"],
    J: Float[Tensor, "*n i k"],
    a: Float[Tensor, "*n k"],
    c: Float[Tensor, "*n i"],
) -> tuple[Tensor, Tensor]:
    """x and s with H x + Jᵀs = a and J x = c, differentiable as often as needed.

    Where equations are redundant s is not unique: the least, in equations of length 1.
    """
    outputs = H.shape[-1]
    d = length(J.detach())
    d = torch.where(d > 0, d, 1).reciprocal().unsqueeze(-1)
    unit = J * d
    zero = torch.zeros_like(unit @ unit.mT)
    top, bottom = torch.cat([H, unit.mT], -1), torch.cat([unit, zero], -1)
    rhs = torch.cat([a, d.squeeze(-1) * c], -1)
    (found,) = cast(Any, apply_mapped(_Symmetric, torch.cat([top, bottom], -2), rhs))
    return found[..., :outputs], d.squeeze(-1) * found[..., outputs:]


@final
class _Symmetric(Function):
    """x = T⁻¹ rhs for symmetric T, the least where it is singular.

    Its derivatives are the same function: ∂rhs = T⁻¹g =: s, ∂T = −s xᵀ.
    """

    @staticmethod
    def forward(T: Tensor, rhs: Tensor) -> tuple[Tensor]:
        return (_solved(T, rhs),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.save_for_backward(inputs[0], output[0])
        ctx.save_for_forward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        T, x = ctx.saved_tensors
        (s,) = cast(Any, apply_mapped(_Symmetric, T, grads[0]))
        return -s.unsqueeze(-1) * x.unsqueeze(-2), s

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        T, x = ctx.saved_tensors
        dT, rhs = tangents
        moved = torch.zeros_like(x) if rhs is None else rhs
        if dT is not None:
            moved = moved - (dT @ x.unsqueeze(-1)).squeeze(-1)
        return tuple(cast(Any, apply_mapped(_Symmetric, T, moved)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], T: Tensor, rhs: Tensor) -> tuple[Any, ...]:
        """A batch of batches is a batch: the mapped dimension joins N."""
        given = (lead(x, d, info.batch_size) for x, d in zip((T, rhs), in_dims, strict=True))
        return tuple(cast(Any, _Symmetric.apply(*given))), (0,)


def _solved(T: Float[Tensor, "*n m m"], rhs: Float[Tensor, "*n m"]) -> Float[Tensor, "*n m"]:
    LU, pivots, _ = torch.linalg.lu_factor_ex(T)
    x = torch.linalg.lu_solve(LU, pivots, rhs.unsqueeze(-1)).squeeze(-1)
    sizes = diagonal(LU).abs()
    regular = (sizes.amin(-1) > _SINGULAR * sizes.amax(-1)) & x.isfinite().all(-1)
    bad = (~regular).nonzero(as_tuple=True)
    if len(bad[0]):
        whole = T[bad].nan_to_num(0.0, 0.0, 0.0)
        inverse = torch.linalg.pinv(whole, hermitian=True, rtol=_SINGULAR)
        x[bad] = (inverse @ rhs[bad].unsqueeze(-1)).squeeze(-1)
    return x

"""Derivatives of a solve in ball arithmetic of 1400 bits: what float64 is compared with.

Everything is worked out at the λ and u that were returned: H = A diag(σ'(u)) Aᵀ is formed and
solved, which float64 may not do. Slopes of 1e-300 beside 1 leave more than a hundred digits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flint import arb, arb_mat, ctx, fmpq, fmpq_mat
from numpy.typing import NDArray

from fuzzing.laws import Base, Law, known_base

Array = NDArray[np.floating]
ctx.prec = 1400


def column(x: Sequence) -> arb_mat:
    return arb_mat(len(x), 1, [y if isinstance(y, arb) else arb(float(y)) for y in x])


def matrix(A: Array) -> arb_mat:
    return arb_mat(*A.shape, [arb(x) for x in A.ravel().tolist()])


def numbers(x: arb_mat) -> Array:
    return np.array([float(y.mid()) for y in x.entries()]).reshape(x.nrows(), x.ncols())


def times(x: arb_mat, y: arb_mat) -> arb_mat:
    """x∘y for columns."""
    return column([a * b for a, b in zip(x.entries(), y.entries(), strict=True)])


def _sigmoid(x: arb) -> tuple[arb, arb, arb]:
    e = (-x).exp()
    z = 1 / (1 + e)
    slope = z * z * e
    return z, slope, slope * (1 - 2 * z)


def _tanh(x: arb) -> tuple[arb, arb, arb]:
    p, slope, _ = _sigmoid(2 * x)
    z = 2 * p - 1
    return z, 4 * slope, -8 * z * slope


def _srlu(a: float, b: float, x: arb) -> tuple[arb, arb, arb]:
    gap = arb(a) - arb(b)
    p, pq, _ = _sigmoid(gap * x * x / 2)
    slope = b + gap * p + gap * gap * x * x * pq
    return x * (b + gap * p), slope, gap * gap * x * pq * (3 + gap * x * x * (1 - 2 * p))


def _activate(name: str, base: Base, x: arb) -> tuple[arb, arb, arb]:
    """σ, σ' and σ'' of a base."""
    if name == "srlu":
        return _srlu(*base.parameters, x)
    e = x.exp() if name == "exp" else arb(1)
    own = {"sigmoid": _sigmoid, "tanh": _tanh}
    return own[name](x) if name in own else ((e, e, e) if name == "exp" else (x, e, arb(0)))


def activate(law: Law, u: Array) -> tuple[arb_mat, arb_mat, arb_mat] | None:
    """z, w = σ'(u) and σ''(u) of one sample; None for an activation that is not known here."""
    found: list = [None] * len(u)
    for index, base in law.groups:
        name = known_base(base)
        if name is None:
            return None
        for k in index.tolist():
            scale, τ = arb(law.scale[k]), arb(law.temperature[k])
            z, slope, bend = _activate(name, base, arb(float(u[k])) / τ)
            found[k] = arb(law.shift[k]) + scale * z, scale / τ * slope, scale / (τ * τ) * bend
    return tuple(map(column, zip(*found, strict=True))) if found else None


@dataclass(frozen=True)
class Gradients:
    """∂v, ∂b and ∂A, or how they move: the Hessian times a direction."""

    v: Array
    b: Array
    A: Array

    def named(self) -> dict[str, Array]:
        return {"∂v": self.v, "∂b": self.b, "∂A": self.A}


@dataclass(frozen=True)
class Precise:
    """One sample at its λ and u; `kept` are its independent equations."""

    A: arb_mat
    multipliers: arb_mat
    z: arb_mat
    w: arb_mat
    bend: arb_mat
    kept: tuple[int, ...]

    @cached_property
    def _rows(self) -> arb_mat:
        K = self.A.ncols()
        return arb_mat(len(self.kept), K, [self.A[i, k] for i in self.kept for k in range(K)])

    @cached_property
    def _inverse(self) -> arb_mat:
        rows, w = self._rows, self.w.entries()
        K = rows.ncols()
        weighted = arb_mat(
            K, len(self.kept), [w[k] * rows[i, k] for k in range(K) for i in range(len(self.kept))]
        )
        return (rows * weighted).inv()

    @cached_property
    def _range(self) -> arb_mat | None:
        """The projector onto the range of A; None where equations are independent."""
        if len(self.kept) == self.A.nrows():
            return None
        rows = self._rows
        fold = self.A * rows.transpose() * (rows * rows.transpose()).inv()
        return fold * (fold.transpose() * fold).inv() * fold.transpose()

    def pull(self, g_z: arb_mat, g_u: arb_mat, g_ν: arb_mat) -> tuple[arb_mat, arb_mat, arb_mat]:
        """x, s and t as systems/pull.py defines them."""
        if self._range is not None:
            g_ν = self._range * g_ν
        rhs = self._rows * (g_u + times(self.w, g_z)) + column([g_ν[i, 0] for i in self.kept])
        found = (self._inverse * rhs).entries()
        s = arb_mat(self.A.nrows(), 1)
        for i, value in zip(self.kept, found, strict=True):
            s[i, 0] = value
        if self._range is not None:
            s = self._range * s
        t = g_z - self.A.transpose() * s
        return g_u + times(self.w, t), s, t

    def gradients(self, g_z: arb_mat, g_ν: arb_mat, g_u: arb_mat) -> Gradients:
        x, s, _ = self.pull(g_z, g_u, g_ν)
        dA = self.multipliers * x.transpose() - s * self.z.transpose()
        return Gradients(*(numbers(y) for y in (x, s, dA)))

    def hessian_product(
        self, g_z: arb_mat, g_ν: arb_mat, g_u: arb_mat, dv: arb_mat, db: arb_mat, dA: arb_mat
    ) -> Gradients:
        """How the gradients move with v, b and A."""
        x, s, t = self.pull(g_z, g_u, g_ν)
        pushed = dv + dA.transpose() * self.multipliers
        dz, ds, du = self.pull(pushed, 0 * dv, dA * self.z - db)
        moved = times(times(self.bend, du), t)
        dx, ds_, _ = self.pull(-(dA.transpose() * s), moved, dA * x)
        ddA = self.multipliers * dx.transpose() - ds * x.transpose()
        ddA = ddA - ds_ * self.z.transpose() - s * dz.transpose()
        return Gradients(*(numbers(y) for y in (dx, ds_, ddA)))


def independent(A: Array) -> tuple[int, ...]:
    """Equations that imply the others, in rational arithmetic."""
    exact = fmpq_mat(
        A.shape[1], A.shape[0], [fmpq(*float(x).as_integer_ratio()) for x in A.T.ravel()]
    )
    reduced, rank = exact.rref()
    return tuple(next(k for k in range(A.shape[0]) if reduced[i, k] != 0) for i in range(rank))


def pulled(A: Array, w: Array, g_z: Array, g_u: Array, g_ν: Array) -> tuple[Array, Array, Array]:
    """x, s and t of one sample, where outputs with w = 0 stand still.

    Of all s that move the other outputs alike it is the least.
    """
    still = w == 0
    free = np.where(still, 0.0, A)
    kept = independent(free)
    asked = matrix(A) * column(np.where(still, g_u, 0)) + column(g_ν)
    given = column(g_z), column(np.where(still, 0, g_u)), asked
    blank = column(np.zeros(len(w)))
    sample = Precise(matrix(free), column(np.zeros(len(A))), blank, column(w), blank, kept)
    x, s = given[1] + times(column(w), given[0]), 0 * asked
    if kept:
        x, s, _ = sample.pull(*given)
    t = given[0] - matrix(A).transpose() * s
    return tuple(numbers(y)[:, 0] for y in (x + column(np.where(still, g_u, 0)), s, t))

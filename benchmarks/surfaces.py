"""Nonlinear problems by family: feasible outputs, the equations they satisfy, noise on logits.

Products, norms, ratios, quartics, entropies, quadratics; mixing and energy balances, vapour–liquid
equilibrium, a reactor; AC power flow (with PYPOWER).
z* is feasible, and v = u(z*) + noise·unit·N(0, 1).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import taut
from taut.activations import bounded, exp, linear, mixed, resolve, sigmoid, tempered
from taut.activations.codes import units

Draw = Callable[[int, torch.Generator], tuple[Tensor, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Family:
    """h, σ, a draw of feasible z and their params; A with b = A z."""

    h: Callable[..., Tensor]
    activation: Any
    draw: Draw
    A: Tensor | None = None
    b: Callable[[tuple[Tensor, ...]], Tensor] | None = None  # where it is not A z
    feasible: bool = True

    def problem(self, n: int, noise: float, seed: int) -> "Problem":
        source = torch.Generator().manual_seed(seed)
        z, params = self.draw(n, source)
        activation = resolve(self.activation)
        unit = units(activation, z.shape[-1])
        unit = torch.where(unit.isinf(), 1, unit)
        v = activation.inverse(z) + noise * unit * torch.randn(z.shape, generator=source).to(z)
        b = None
        if self.A is not None:
            b = z @ self.A.mT if self.b is None else self.b(params)
        return Problem(self, v, b, params, z)


@dataclass(frozen=True)
class Problem:
    family: Family
    v: Tensor
    b: Tensor | None
    params: tuple[Tensor, ...]
    z: Tensor  # feasible

    def take(self, index: Any) -> "Problem":
        """Some of the samples."""
        b, params = None if self.b is None else self.b[index], tuple(p[index] for p in self.params)
        return Problem(self.family, self.v[index], b, params, self.z[index])

    def solve(self, v: Tensor | None = None, **options: Any) -> taut.Solution:
        own, v = self.family, self.v if v is None else v
        options = {"on_failure": "return", **options}
        given = {"h": own.h, "params": self.params, "activation": own.activation}
        return taut.project(v, own.A, self.b, **given, **options)


def _uniform(source: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=source, dtype=torch.float64)


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def at_values(h: Callable[..., Tensor], low: float, high: float, outputs: int, m: int) -> Draw:
    """z uniform, and h(z) = its own value there: h must subtract its one parameter."""

    def draw(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
        z = _uniform(source, low, high, n, outputs)
        return z, (h(z, z.new_zeros(n, m)),)

    return draw


def product(z: Tensor, c: Tensor) -> Tensor:
    return z[..., :1] * z[..., 1:2] - c


def products(z: Tensor, c: Tensor) -> Tensor:
    return z[..., 0::2] * z[..., 1::2] - c


def norm(z: Tensor, c: Tensor) -> Tensor:
    return z.square().sum(-1, keepdim=True) - c


def ratio(z: Tensor, c: Tensor) -> Tensor:
    z0, z1, z2, z3, z4, z5 = z.unbind(-1)
    return torch.stack([z0 / (z0 + z1), z2 / z3, z4 * z5 / z0], -1) - c


def quartic(z: Tensor, c: Tensor) -> Tensor:
    z0, z1, z2, z3, z4, z5 = z.unbind(-1)
    first = z.pow(4).sum(-1) + z0 * z1 * z2 * z3
    return torch.stack([first, (z0.square() - z1).square() + z4 * z5], -1) - c


def entropy(z: Tensor, c: Tensor) -> Tensor:
    return -(z * z.log()).sum(-1, keepdim=True) - c


def on_simplex(h: Callable[..., Tensor]) -> Draw:
    def draw(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
        z = torch.softmax(1.2 * _normal(source, n, 6), -1)
        return z, (h(z, z.new_zeros(n, 1)),)

    return draw


def toy(z: Tensor, x: Tensor) -> Tensor:
    return (0.5 * z[..., :1]).square() + x.square() + z[..., 1:2]


def _toy(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    x = _uniform(source, -2, 2, n, 1)
    return torch.cat([2 * (5 * x).sin(), -((5 * x).sin().square() + x.square())], -1), (x,)


def quadratic(outputs: int, m: int) -> Callable[..., Tensor]:
    """zᵀQᵢz + aᵢᵀz, with fixed random Q and a."""
    source = torch.Generator().manual_seed(7)
    Q = _normal(source, m, outputs, outputs) / math.sqrt(outputs)
    Q, a = 0.5 * (Q + Q.mT), _normal(source, m, outputs)

    def h(z: Tensor, c: Tensor) -> Tensor:
        return torch.einsum("...j,ijk,...k->...i", z, Q, z) + z @ a.mT - c

    return h


def redundant(z: Tensor, c: Tensor) -> Tensor:
    first, second = z[..., :1] * z[..., 1:2] - c[..., :1], z[..., 2:3] * z[..., 3:4] - c[..., 1:]
    return torch.cat([first, second, 2 * first - second, first], -1)


def _redundant(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    z = _uniform(source, 0.3, 3, n, 5)
    return z, (torch.stack([z[:, 0] * z[:, 1], z[:, 2] * z[:, 3]], -1),)


#: Antoine's constants of benzene and toluene: log10 of the vapour pressure in bar, at T in K.
_ANTOINE = torch.tensor([[4.01814, 1203.835, -53.226], [4.07827, 1343.943, -53.773]]).double()


def _vapour(T: Tensor) -> Tensor:
    a, b, c = _ANTOINE.unbind(-1)
    return 10 ** (a - b / (T + c))


def equilibrium(z: Tensor) -> Tensor:
    """Raoult's law: yᵢP = xᵢpᵢ(T), of (x₁, x₂, y₁, y₂, T, P)."""
    x, y, T, P = z[..., :2], z[..., 2:4], z[..., 4:5], z[..., 5:]
    return y * P - x * _vapour(T)


def _equilibrium(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, T = _uniform(source, 0.05, 0.95, n, 1), _uniform(source, 340, 400, n, 1)
    x = torch.cat([x, 1 - x], -1)
    partial = x * _vapour(T)
    P = partial.sum(-1, keepdim=True)
    return torch.cat([x, partial / P, T, P], -1), ()


def reactor(z: Tensor, p: Tensor) -> Tensor:
    """A stirred tank with Arrhenius kinetics: (c_A, c_B, T), params (τ, c₀, T₀)."""
    c, _, T = z.unbind(-1)
    τ, c0, T0 = p.unbind(-1)
    rate = 7.2e7 * torch.exp(-6500.0 / T) * c
    return torch.stack([c0 - c - τ * rate, T0 - T + 40.0 * τ * rate], -1)


def _reactor(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    c, T = _uniform(source, 0.1, 1.5, n), _uniform(source, 320, 420, n)
    τ = _uniform(source, 0.2, 3, n)
    rate = 7.2e7 * torch.exp(-6500.0 / T) * c
    z = torch.stack([c, τ * rate, T], -1)
    return z, (torch.stack([τ, c + τ * rate, T - 40 * τ * rate], -1),)


def energy(z: Tensor) -> Tensor:
    """Two mixers and a splitter: m₁…₆, T₁…₆."""
    q, T = z[..., :6] * z[..., 6:], z[..., 6:]
    q1, q2, q3, q4, q5, q6 = q.unbind(-1)
    return torch.stack([q1 + q2 - q5, q5 + q3 - q6 - q4, T[..., 3] - T[..., 5]], -1)


def _energy(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    m, T = _uniform(source, 0.5, 3, n, 3), _uniform(source, 280, 400, n, 3)
    m1, m2, m3 = m.unbind(-1)
    T1, T2, T3 = T.unbind(-1)
    m4, m5 = _uniform(source, 0.1, 0.4, n), m1 + m2
    T5 = (m1 * T1 + m2 * T2) / m5
    T6 = (m5 * T5 + m3 * T3) / (m5 + m3)
    outputs = [m1, m2, m3, m4, m5, m5 + m3 - m4, T1, T2, T3, T6, T5, T6]
    return torch.stack(outputs, -1), ()


def distillation(z: Tensor, x: Tensor) -> Tensor:
    """Balances of an extractive column: flows times fractions."""
    z0, z1, z2, z3, _, z5, z6, _, z8 = z.unbind(-1)
    feed, _, boil = x.unbind(-1)
    balances = [0.697616946 * feed - z0 * z2 - z1 * z5, 0.302383054 * feed - z0 * z3 - z1 * z6]
    return torch.stack([*balances, boil * z0 - z8], -1)


def _distillation(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    many = 8 * n + 64  # of which some half have fractions above 0
    z0, z1 = _uniform(source, 0.1, 0.3, many), _uniform(source, 1, 2, many)
    f = torch.softmax(_normal(source, many, 3), -1)
    q = torch.softmax(_normal(source, many, 3), -1)
    feed = (z0 * f[:, 0] + z1 * q[:, 0]) / 0.697616946
    z6 = (0.302383054 * feed - z0 * f[:, 1]) / z1
    z7 = 1 - q[:, 0] - z6
    boil = _uniform(source, 2, 5, many)
    z = torch.stack([z0, z1, *f.unbind(-1), q[:, 0], z6, z7, boil * z0], -1)
    x = torch.stack([feed, z0 + z1 - feed, boil], -1)
    kept = ((z6 > 0.01) & (z7 > 0.01)).nonzero().squeeze(-1)
    index = kept[:n]
    return z[index], (x[index],)


def _balance(params: tuple[Tensor, ...]) -> Tensor:
    total = params[0][:, 0] + params[0][:, 1]
    return torch.stack([total, torch.ones_like(total), torch.ones_like(total)], -1)


def _rows(outputs: int, *rows: dict[int, float]) -> Tensor:
    A = torch.zeros(len(rows), outputs, dtype=torch.float64)
    for i, row in enumerate(rows):
        for k, a in row.items():
            A[i, k] = a
    return A


_COLUMN = _rows(9, {0: 1, 1: 1}, {2: 1, 3: 1, 4: 1}, {5: 1, 6: 1, 7: 1})
_SUM = torch.ones(1, 6, dtype=torch.float64)
_FIVE = torch.stack([torch.ones(5), 2 * torch.ones(5)]).double()
_MIXERS = _rows(12, {0: 1, 1: 1, 4: -1}, {4: 1, 2: 1, 3: -1, 5: -1})
_TEMPERATURE = tempered(bounded(300.0, 450.0), 1 / 150)
_HOT = tempered(bounded(250.0, 600.0), 1 / 350)
_WARM = tempered(bounded(250.0, 450.0), 1 / 200)

#: Feasible, as in the grid; the names end with the geometry.
FAMILIES: dict[str, Family] = {
    "product/exp": Family(product, exp, at_values(product, 0.3, 3, 2, 1)),
    "product/linear": Family(product, linear, at_values(product, 0.3, 3, 2, 1)),
    "products/sigmoid": Family(products, sigmoid, at_values(products, 0.1, 0.9, 8, 4)),
    "norm/linear": Family(norm, linear, at_values(norm, -2, 2, 8, 1)),
    "norm/exp": Family(norm, exp, at_values(norm, 0.1, 3, 8, 1)),
    "norm/tanh": Family(norm, "tanh", at_values(norm, -0.9, 0.9, 8, 1)),
    "ratio/exp": Family(ratio, exp, at_values(ratio, 0.2, 4, 6, 3)),
    "equilibrium/mixed": Family(
        equilibrium,
        mixed([sigmoid] * 4 + [_TEMPERATURE, exp]),
        _equilibrium,
        _rows(6, {0: 1, 1: 1}, {2: 1, 3: 1}),
    ),
    "reactor/mixed": Family(
        reactor, mixed([exp, exp, _HOT]), _reactor, _rows(3, {0: 1, 1: 1}), lambda p: p[0][:, 1:2]
    ),
    "energy/mixed": Family(energy, mixed([exp] * 6 + [_WARM] * 6), _energy, _MIXERS),
    "quartic/linear": Family(quartic, linear, at_values(quartic, -1.5, 1.5, 6, 2)),
    "quartic/exp": Family(quartic, exp, at_values(quartic, 0.1, 1.5, 6, 2)),
    "simplex, entropy/exp": Family(entropy, exp, on_simplex(entropy), _SUM),
    "simplex, squares/exp": Family(norm, exp, on_simplex(norm), _SUM),
    "toy/linear": Family(toy, linear, _toy),
    "distillation/mixed": Family(
        distillation,
        mixed([exp] * 2 + [sigmoid] * 6 + [exp]),
        _distillation,
        _COLUMN,
        _balance,
    ),
    "distillation/linear": Family(distillation, linear, _distillation, _COLUMN, _balance),
    "quadratic/linear": Family(quadratic(20, 8), linear, at_values(quadratic(20, 8), -1, 1, 20, 8)),
    "quadratic/sigmoid": Family(
        quadratic(20, 8), sigmoid, at_values(quadratic(20, 8), 0.05, 0.95, 20, 8)
    ),
    "redundant/exp": Family(redundant, exp, _redundant, _FIVE),
}


def _asked(low: float, high: float, outputs: int, value: float) -> Draw:
    """z uniform, and another value asked of it."""

    def draw(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
        z = _uniform(source, low, high, n, outputs)
        return z, (torch.full((n, 1), value, dtype=torch.float64),)

    return draw


def _crowded(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    return torch.softmax(_normal(source, n, 6), -1), (torch.full((n, 1), 2.0).double(),)


def waves(z: Tensor, c: Tensor) -> Tensor:
    return z[..., :1].sin() + z[..., 1:2].cos() - c


#: Without a solution.
INFEASIBLE: dict[str, Family] = {
    "norm = −1/linear": Family(norm, linear, _asked(-1, 1, 4, -1.0), feasible=False),
    "product = −1/exp": Family(product, exp, _asked(0.3, 3, 2, -1.0), feasible=False),
    "squares = 2/exp": Family(norm, exp, _crowded, _SUM, feasible=False),
    "waves = 2.5/linear": Family(waves, linear, _asked(-1, 1, 2, 2.5), feasible=False),
}


@cache
def power_flow(case: str) -> Family:
    """z = (V, θ, P, Q) of every bus: P + iQ = V ∘ conj(Y V), the angle of the first bus 0."""
    from power_flow import Grid  # the example

    grid = Grid.of(case)

    def draw(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
        V = grid.V + 0.02 * _normal(source, n, grid.buses)
        θ = grid.θ + 0.05 * _normal(source, n, grid.buses)
        θ = θ - θ[:, :1]
        return torch.cat([V, θ, *grid.injections(V, θ)], -1), ()

    A = _rows(4 * grid.buses, {grid.buses: 1})
    activation = mixed([bounded(0.7, 1.4)] * grid.buses + [linear] * (3 * grid.buses))
    return Family(grid.mismatch, activation, draw, A)

"""Nonlinear equations: random ones and those of `surfaces`, and a check of every CONVERGED sample.

Feasible to rounding, stationary, a strict minimum: all three worked out anew, by torch.func and
NumPy, from the h that was drawn.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from surfaces import FAMILIES, INFEASIBLE, Family, Problem
from taut import Solution, Status
from taut.activations import bounded, mixed, resolve, tempered, weighted
from taut.activations.codes import units

EVERY, SAMPLES = 16, 12  # blocks; samples of each
_NOISES = (0.1, 0.3, 1.0, 3.0, 10.0)
_OUTPUTS = ("exp", "sigmoid", "tanh", "linear", "srlu")


def drawn(seed: int, number: int) -> Problem:
    """The nonlinear problem of block `number`: always the same."""
    draws = np.random.default_rng([seed, number, 16])
    noise, own = float(draws.choice(_NOISES)), int(draws.integers(2**31))
    kind = draws.integers(4)
    if kind == 0:
        family = FAMILIES[str(draws.choice(list(FAMILIES)))]
    elif kind == 1:
        family = INFEASIBLE[str(draws.choice(list(INFEASIBLE)))]
    else:
        family = _random(draws)
    given = family.problem(SAMPLES, noise, own)
    if kind == 3:  # another value asked than the one at z: there may be no solution, or far away
        shift = torch.from_numpy(draws.normal(size=tuple(given.params[0].shape)))
        given = replace(given, params=(given.params[0] + 0.3 * shift,))
    if draws.random() < 0.1:
        given.v[int(draws.integers(SAMPLES)), 0] = float(draws.choice([np.nan, np.inf, -np.inf]))
    return given


def _random(draws: np.random.Generator) -> Family:
    """Quadratics, cubes and waves of up to 8 outputs, with units of their own; A beside them."""
    outputs = int(draws.integers(2, 9))
    m, rows = int(draws.integers(1, outputs)), int(draws.integers(0, 2))
    Q = torch.from_numpy(draws.normal(size=(m, outputs, outputs)) / outputs)
    a, cubes, waves = (torch.from_numpy(draws.normal(size=(m, outputs))) for _ in range(3))
    size = torch.from_numpy(10.0 ** draws.uniform(-3, 3, m))
    cubes, waves = (x * float(draws.random() < 0.4) for x in (cubes, waves))
    twice = draws.random() < 0.15  # a redundant equation

    def h(z: Tensor, c: Tensor) -> Tensor:
        value = torch.einsum("nj,ijk,nk->ni", z, Q, z) + z @ a.mT
        value = size * (value + z.pow(3) @ cubes.mT + z.sin() @ waves.mT) - c
        return torch.cat([value, value[:, :1]], -1) if twice else value

    chosen = [_one(draws, str(draws.choice(_OUTPUTS))) for _ in range(outputs)]
    activation = resolve(str(draws.choice(_OUTPUTS))) if draws.random() < 0.5 else mixed(chosen)

    def draw(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
        u = torch.randn(n, outputs, generator=source, dtype=torch.float64)
        z = activation.sigma(u * units(activation, outputs).clamp(max=1))
        return z, (h(z, z.new_zeros(n, m))[:, :m],)

    A = torch.from_numpy(draws.normal(size=(rows, outputs))) if rows else None
    return Family(h, activation, draw, A)


def _one(draws: np.random.Generator, name: str):
    kind = draws.integers(4)
    if kind == 0:
        return tempered(name, float(10 ** draws.uniform(-1, 1)))
    if kind == 1:
        return weighted(name, float(10 ** draws.uniform(-1, 1)))
    return bounded(-1.0, float(draws.uniform(0, 5))) if kind == 2 else name


def check_curves(seed: int, number: int) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Failed checks of the nonlinear problem of this block, and how many samples were checked."""
    if (number + 1) % EVERY:
        return [], Counter()
    given = drawn(seed, number)
    solution = given.solve()
    names = [Status(x).name for x in solution.status.tolist()]
    counts = Counter(f"nonlinear, {name}" for name in names)
    found = []
    for row in solution.converged.nonzero().squeeze(-1).tolist():
        found += [(row, f"nonlinear: {check}") for check in failed(given, solution, row)]
    return found, counts


def failed(given: Problem, solution: Solution, row: int) -> list[str]:
    """What a CONVERGED sample promises and does not keep."""
    one, activation = given.take([row]), resolve(given.family.activation)
    z, u, λ = (x[row] for x in (solution.z, solution.u, solution.multipliers))
    h = _of_one(one)
    free = u.isfinite()
    J, own = torch.func.jacrev(h)(z), λ[len(λ) - len(h(z)) :]
    S = torch.func.jacrev(torch.func.jacrev(lambda x: (own * h(x)).sum()))(z)
    c, side = h(z), torch.zeros_like(own)
    if one.b is not None:
        A = one.family.A
        J, c = torch.cat([A, J]), torch.cat([A @ z - one.b[0], c])
        side = torch.cat([one.b[0].abs(), side])
    v, u = (x.where(free, 0) for x in (one.v[0], u))
    w = torch.where(free, activation.slope(u.unsqueeze(0))[0], 0)
    unit = units(activation, len(z)).nan_to_num(posinf=1.0)
    cap = side + J.abs() @ (z.abs() + w * (u.abs() + v.abs() + unit))
    J, S, c, z, u, v, w, λ, cap = (x.numpy() for x in (J, S, c, z, u, v, w, λ, cap))
    r = np.sqrt(w)
    wrong = [] if (np.abs(c) <= 1.01e-12 * cap + 1e-300).all() else ["feasible to rounding"]
    σ = activation.sigma(torch.from_numpy(u).unsqueeze(0))[0].numpy()
    inside = free.numpy()
    if (np.abs(σ - z) > 1e-14 * (np.abs(z) + w * np.abs(u)) + 1e-300)[inside].any():
        wrong.append("z = σ(u)")
    bent, scaled = np.eye(len(z)) - r[:, None] * S * r, J * r
    size = np.linalg.norm(scaled, axis=1)
    size = np.where(size > 0, size, 1)
    off, g = r * (v - u + J.T @ λ), r * (u - v)
    return wrong + _at_minimum(bent, scaled / size[:, None], off, -c / size, g)


def _at_minimum(
    H: np.ndarray, rows: np.ndarray, off: np.ndarray, c: np.ndarray, g: np.ndarray
) -> list[str]:
    """Is the next Newton step short, and H positive along the surface?"""
    _, s, Vh = np.linalg.svd(rows)
    rank = int((s > 1e-8).sum())
    along = Vh[rank:]
    wrong = []
    reduced = along @ H @ along.T
    if len(along) and np.linalg.eigvalsh(reduced)[0] <= 0:
        wrong.append("a strict minimum")
    onto = np.linalg.pinv(rows, rcond=1e-8) @ c
    step = onto
    if len(along) and not wrong:
        step = onto + along.T @ np.linalg.solve(reduced, along @ (off - H @ onto))
    if np.linalg.norm(step) > 1e-8 * (1 + np.linalg.norm(g)):
        wrong.append("stationary: the next Newton step is short")
    return wrong


def _of_one(one: Problem) -> Callable[[Tensor], Tensor]:
    return lambda z: one.family.h(z.unsqueeze(0), *one.params)[0]

"""Nonlinear equations: random ones and those of `surfaces`, and a check of every CONVERGED sample.

Feasible to rounding, stationary, a strict minimum: all three worked out anew, by torch.func and
NumPy, from the h that was drawn. Some problems have samples in units of their own, 1e-12 to 1e12:
they must be solved as in one unit. Some have second derivatives that differ from sample to sample
along a contrast: the gradients of a batch must be those of its samples.
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
_EASY = 8  # iterations of a sample that no rounding decides


def drawn(seed: int, number: int) -> Problem:
    """The nonlinear problem of block `number`: always the same."""
    draws = np.random.default_rng([seed, number, 16])
    noise, own = float(draws.choice(_NOISES)), int(draws.integers(2**31))
    kind = draws.integers(6)
    if kind == 0:
        family = FAMILIES[str(draws.choice(list(FAMILIES)))]
    elif kind == 1:
        family = INFEASIBLE[str(draws.choice(list(INFEASIBLE)))]
    else:
        family = _contrasts(draws) if kind == 4 else _random(draws, kind == 5)
    given = family.problem(SAMPLES, noise, own)
    if kind == 3:  # another value asked than the one at z: there may be no solution, or far away
        shift = torch.from_numpy(draws.normal(size=tuple(given.params[0].shape)))
        given = replace(given, params=(given.params[0] + 0.3 * shift,))
    if kind == 5:
        given = _in_units(draws, given)
    elif draws.random() < 0.1:
        given.v[int(draws.integers(SAMPLES)), 0] = float(draws.choice([np.nan, np.inf, -np.inf]))
    return given


def _in_units(draws: np.random.Generator, given: Problem) -> Problem:
    """The same of t z, with a t for each sample; of h in a unit of its own. The first t are 1."""
    powers = draws.uniform(-12, 12, (SAMPLES, 1))
    if draws.random() < 0.5:  # one large or small sample in the batch
        powers[1:] = 0
    t = torch.from_numpy(10.0**powers)
    unit, own = 10.0 ** float(draws.uniform(-12, 12)), given.family.h

    def h(z: Tensor, t: Tensor, *params: Tensor) -> Tensor:
        return unit * own(z / t, *params)

    b = None if given.b is None else given.b * t
    return Problem(replace(given.family, h=h), given.v * t, b, (t, *given.params), given.z * t)


def _in_one_unit(given: Problem) -> Problem:
    t, *params = given.params
    b = None if given.b is None else given.b / t
    return Problem(given.family, given.v / t, b, (torch.ones_like(t), *params), given.z / t)


def _contrasts(draws: np.random.Generator) -> Family:
    """A quadratic and the cube of a contrast, or its square by a number of each sample."""
    outputs, m = int(draws.integers(8, 13)), int(draws.integers(1, 4))
    Q = torch.from_numpy(draws.normal(size=(m, outputs, outputs)) / outputs)
    w = np.zeros(outputs)
    order = draws.permutation(outputs)
    entries = [[1, -1], [1, -1, -1, 1], [1, -2, 1], [1, -3, 3, -1]][int(draws.integers(4))]
    w[order[: len(entries)]] = entries
    cube, w = bool(draws.random() < 0.5), torch.from_numpy(w)

    def h(z: Tensor, c: Tensor) -> Tensor:
        along = (z @ w).unsqueeze(-1)
        along = along.pow(3) if cube else along.square() * c[:, -1:]
        return torch.einsum("nj,ijk,nk->ni", z, Q, z) + along - c[:, :m]

    def draw(n: int, source: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
        z = 1 + 0.3 * torch.randn(n, outputs, generator=source, dtype=torch.float64)
        own = torch.rand(n, 1, generator=source, dtype=torch.float64)
        c = torch.cat([z.new_zeros(n, m), own], -1)
        return z, (torch.cat([h(z, c), own], -1),)

    return Family(h, "linear", draw, None)


def _random(draws: np.random.Generator, lines: bool) -> Family:
    """Quadratics, cubes and waves of up to 8 outputs, with units of their own; A beside them.

    With `lines`, in weighted Euclidean geometries.
    """
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
    if lines:
        activation = weighted("linear", torch.from_numpy(10.0 ** draws.uniform(-1, 1, outputs)))

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
    return found + _laws(given, solution), counts


def _laws(given: Problem, solution: Solution) -> list[tuple[int, str]]:
    """What holds of samples of a batch, and of units."""
    name = given.family.h.__qualname__
    found = []
    if "_in_units" in name:
        one = _in_one_unit(given).solve()
        easy = one.converged & (one.iterations <= _EASY)
        lost = (easy & ~solution.converged).nonzero().squeeze(-1).tolist()
        found += [(row, "nonlinear: solved in another unit") for row in lost]
    elif "_contrasts" in name:
        v = given.v.clone().requires_grad_()
        g = torch.linspace(-1.0, 1.0, v.shape[-1], dtype=v.dtype)
        (whole,) = torch.autograd.grad((given.solve(v).z * g).sum(), v)
        for row in solution.converged.nonzero().squeeze(-1).tolist():
            start = solution.u[[row]], solution.multipliers[[row]]
            leaf = given.v[[row]].requires_grad_()
            alone = given.take([row]).solve(leaf, init=start)
            (own,) = torch.autograd.grad((alone.z * g).sum(), leaf)
            apart = (own[0] - whole[row]).abs().max()
            if bool(alone.converged) and apart > 1e-7 * (1 + own.abs().max()):
                found.append((row, "nonlinear: the gradient of a batch is that of its samples"))
    return found


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
    unit = units(activation, len(z))
    line = unit.isinf()
    size = torch.where(line, w.sqrt() * torch.maximum(u.abs(), v.abs()), 0).max()
    unit = torch.where(line, size / w.sqrt().clamp_min(1e-300), unit)
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

"""Gradients by autograd, by torch.func and by the kernel, where outputs stand still.

Small problems of rows and bounds: outputs held at an end of their range by v = ±inf or clipped at a
bound, rows that are alike but for these, and rows that others imply. Each gradient is compared with
that of ball arithmetic at the λ and u that it belongs to. Of all s it is that of the least.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import taut
from fuzzing.gradients import allowed
from fuzzing.precise import pulled
from taut.activations import bounded, mixed, resolve, tempered, weighted

EVERY, SAMPLES = 8, 4  # blocks; samples of each
_EPS = 2.0**-52
_TRIALS = 3
PARTS = ("z", "λ", "u")
MATRICES = ("A", "G")


@dataclass(frozen=True)
class Sample:
    """One sample of rows and bounds at its solution."""

    given: dict[str, Tensor]  # matrices and sides of this sample
    multipliers: Tensor
    z: Tensor
    w: Tensor  # 0 where an output stands still
    held: Tensor
    low: Tensor | None  # outputs at their floor, and at their ceiling
    high: Tensor | None

    @classmethod
    def of(
        cls, tensors: dict[str, Tensor], activation: Any, found: tuple[Tensor, ...], i: int
    ) -> "Sample":
        """Sample i of a batch with matrices for all; `found` are its z, λ and u."""
        given = {k: (x if k in MATRICES else x[i]).detach() for k, x in tensors.items()}
        z, multipliers, u = (x[i].detach() for x in found)
        chosen, held, low, high = resolve(activation), u.isinf(), None, None
        w = torch.where(held, 0, chosen.slope(torch.where(held, 0, u)))
        if "lower" in given and "G" not in given:
            free, fixed = chosen.sigma(u), given["lower"] == given["upper"]
            low = ((free < given["lower"]) | fixed) & ~held
            high = (free > given["upper"]) & ~fixed & ~held
            w = torch.where(low | high, 0, w)
        return cls(given, multipliers, z, w, held, low, high)

    def gradients(self, g: tuple[Tensor, ...], blur: Any = None) -> dict[str, Tensor]:
        """∂(g·(z, λ, u)) in everything; with `blur` slopes and g are moved by 2^-52.

        Outputs that are held have no gradient.
        """
        rows = len(self.given.get("A", ()))
        active, at_lower = self.multipliers != 0, self.multipliers > 0
        active[:rows] = True
        if "G" in self.given:
            equal = self.given["lower"] == self.given["upper"]
            active[rows:] |= equal
            at_lower[rows:] |= equal
        C = torch.cat([self.given[k] for k in MATRICES if k in self.given])
        g_z, g_u = (torch.where(self.held, 0, g[i]) for i in (0, 2))
        parts = [x.double().numpy() for x in (self.w, g_z, g_u, g[1][active])]
        if blur is not None:
            parts = [x * (1 + _EPS * blur.uniform(-1, 1, x.shape)) for x in parts]
        moved = pulled(C[active].double().numpy(), *parts)
        dv, some, t = (torch.from_numpy(x) for x in moved)
        s = torch.zeros_like(g[1]).masked_scatter(active, some)
        dC = torch.outer(self.multipliers, dv) - torch.outer(s, self.z)
        found = {"v": dv, "A": dC[:rows], "b": s[:rows], "G": dC[rows:]}
        if "G" in self.given:
            found["lower"] = torch.where(at_lower, s, 0)[rows:]
            found["upper"] = torch.where(at_lower, 0, s)[rows:]
        elif self.low is not None:
            found["lower"] = torch.where(self.low, t, 0)
            found["upper"] = torch.where(self.high, t, 0)
        return {k: x for k, x in found.items() if k in self.given}


@dataclass(frozen=True)
class Drawn:
    """A small batch with one matrix for all, and what is asked of its gradients."""

    tensors: dict[str, Tensor]
    activation: Any
    g: tuple[Tensor, ...]  # of z, λ and u

    def solve(self, tensors: dict[str, Tensor], prepared: Any = None) -> taut.Solution:
        own = None if prepared is not None else self.activation
        given = {k: x for k, x in tensors.items() if prepared is None or k not in MATRICES}
        first = {} if prepared is None else {"A": prepared}
        return taut.project(**given, **first, activation=own, on_failure="return")


def draw(seed: int, number: int) -> Drawn:
    """That of block `number`: always the same."""
    rng = np.random.default_rng([seed, number, 18])
    K = int(rng.integers(3, 9))
    I = int(rng.integers(1, K - 1))
    activation = _activation(rng, K)
    lower, upper = (x.expand(K).numpy() for x in activation.range.bounds(torch.zeros(K).double()))
    still = rng.random((SAMPLES, K)) < rng.choice([0.0, 0.3, 0.6])
    still &= np.isfinite(lower) | np.isfinite(upper)
    up = np.where(np.isfinite(lower), np.isfinite(upper) & (rng.random((SAMPLES, K)) < 0.5), True)
    C = _rows(rng, I, K, still.any(0))
    v = rng.choice([1.0, 5.0, 25.0]) * rng.uniform(-1, 1, (SAMPLES, K))
    v = np.where(still, np.where(up, np.inf, -np.inf), v)
    y = activation.sigma(torch.from_numpy(rng.normal(size=(SAMPLES, K)))).numpy()
    y = np.where(still, np.where(up, upper, lower), y)
    tensors = {"v": v, "A": C, "b": y @ C.T}
    kind = rng.integers(4)
    if kind == 1:
        tensors = {"v": v, "G": C, **_sides(rng, y @ C.T)}
    elif kind == 2:
        G = np.concatenate([rng.normal(size=(2, K)), C[:1]])
        tensors |= {"G": G, **_sides(rng, y @ G.T)}
    elif kind == 3:
        width = rng.exponential(0.3, (2, SAMPLES, K)) * (rng.random((2, SAMPLES, K)) < 0.7)
        tensors |= {"lower": y - width[0], "upper": y + width[1]}
    rows = sum(len(tensors[k]) for k in MATRICES if k in tensors)
    g = [rng.normal(size=(SAMPLES, n)) for n in (K, rows, K)]
    on = rng.permutation(3)[: int(rng.integers(1, 4))]
    g = tuple(torch.from_numpy(x * (i in on)) for i, x in enumerate(g))
    return Drawn({k: torch.from_numpy(x) for k, x in tensors.items()}, activation, g)


def _activation(rng: Any, K: int) -> taut.Activation:
    names = ("exp", "sigmoid", "tanh", "linear")
    kind = rng.integers(4)
    if kind == 0:
        return mixed([str(rng.choice(names)) for _ in range(K)])
    name = str(rng.choice(names))
    if kind == 1:
        return tempered(name, float(10 ** rng.uniform(-0.5, 0.5)))
    return weighted(bounded(-1.0, float(rng.uniform(0, 5))), 2.0) if kind == 2 else resolve(name)


def _rows(rng: Any, I: int, K: int, still: Any) -> Any:
    """Rows of whole 64ths, some alike but where outputs may be held, some made of others."""
    C = np.round(64 * rng.normal(size=(I, K))) / 64
    if rng.random() < 0.3:
        C *= rng.random((I, K)) < 0.5
    for i in range(1, I):
        if rng.random() < 0.5:
            C[i, ~still] = rng.choice([0.0, 1.0, -2.0]) * C[0, ~still]
    if rng.random() < 0.5:
        C = np.concatenate([C, np.round(4 * rng.normal(size=(1, I))) / 4 @ C])
    if rng.random() < 0.3:
        C *= 2.0 ** rng.integers(-12, 12, size=(len(C), 1))
    return C


def _sides(rng: Any, at: Any) -> dict[str, Any]:
    """Around what rows come to at y: some are equations, some have one side."""
    gaps = rng.exponential(0.3, (2, *at.shape))
    gaps[:, :, rng.random(at.shape[1]) < 0.3] = 0
    lower, upper = at - gaps[0], at + gaps[1]
    lower[:, (rng.random(at.shape[1]) < 0.2) & (gaps[0] > 0).all(0)] = -np.inf
    return {"lower": lower, "upper": upper}


def check_transforms(seed: int, number: int) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Failed checks of the problem of this block, and how many samples were compared."""
    counts: Counter[str] = Counter()
    if (number + 2) % EVERY:
        return [], counts
    drawn, failures = draw(seed, number), []
    for way in WAYS.items():
        for about, wrong in _judged(drawn, *way):
            counts[f"gradients {about}"] += 1
            failures += [(row, text) for row, text in wrong]
    return failures, counts


def _judged(drawn: Drawn, name: str, way: Any) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    status, found, made = way(drawn)
    for i in (status == 0).nonzero().flatten().tolist():
        at = Sample.of(drawn.tensors, drawn.activation, found, i)
        if not bool((at.w[~at.held] > 1e-280).logical_or(at.w[~at.held] == 0).all()):
            continue
        g = tuple(x[i] for x in drawn.g)
        right, effect = at.gradients(g), 0.0
        for trial in range(_TRIALS):
            moved = at.gradients(g, np.random.default_rng(trial))
            effect = max(effect, *(_gap(moved[k], x) for k, x in right.items()))
        most = allowed(effect, _EPS)
        wrong = [
            (i, f"{name}: ∂{k} where outputs stand still")
            for k, x in made.items()
            if k not in MATRICES and not _gap(x[i], right[k]) <= most
        ]
        yield f"where outputs stand still, {name}", wrong


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, of the largest entry."""
    size = other.abs().amax().item() if other.numel() else 0.0
    return (one - other).abs().amax().item() / max(size, 1e-12) if other.numel() else 0.0


def _value(drawn: Drawn, solution: taut.Solution) -> Tensor:
    u = torch.where(solution.u.isinf(), 0, solution.u)
    found = solution.z, solution.multipliers, u
    return sum((x * w).sum() for x, w in zip(found, drawn.g, strict=True))


def _numbers(solution: taut.Solution) -> tuple[Tensor, tuple[Tensor, ...]]:
    return solution.status, (solution.z, solution.multipliers, solution.u)


def _by_autograd(drawn: Drawn, prepare: bool = False) -> tuple[Tensor, tuple, dict]:
    matrices = {k: drawn.tensors[k] for k in MATRICES if k in drawn.tensors}
    prepared = taut.prepare(matrices.get("A"), drawn.activation, G=matrices.get("G"))
    asked = {k: x for k, x in drawn.tensors.items() if not prepare or k not in MATRICES}
    leaves = {k: x.clone().requires_grad_() for k, x in asked.items()}
    solution = drawn.solve(leaves, prepared if prepare else None)
    options = {"allow_unused": True, "materialize_grads": True}
    made = torch.autograd.grad(_value(drawn, solution), [*leaves.values()], **options)
    return *_numbers(solution), dict(zip(leaves, made, strict=True))


def _by_func(drawn: Drawn) -> tuple[Tensor, tuple, dict]:
    def value(tensors: dict[str, Tensor]) -> tuple[Tensor, Any]:
        solution = drawn.solve(tensors)
        return _value(drawn, solution), _numbers(solution)

    made, numbers = torch.func.grad(value, has_aux=True)(drawn.tensors)
    return *numbers, made


#: Ways to the gradients: with live matrices, by the kernel if there is one, and by torch.func.
WAYS = {
    "autograd": _by_autograd,
    "prepared": partial(_by_autograd, prepare=True),
    "torch.func": _by_func,
}

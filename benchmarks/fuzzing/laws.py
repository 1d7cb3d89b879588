"""An activation twice: as taut builds it, and as NumPy computes it without taut.

Every row of the table and every derived row is shift + scale·σ(u/temperature), coordinate by
coordinate, with σ one of the five of the paper's table. That is what the reference holds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

import taut
from taut import activations

Array = NDArray[np.floating]
Rng = np.random.Generator

LABELS = (
    *sorted(activations.ACTIVATIONS),
    "bounded",
    "weighted",
    "tempered",
    "mixed",
)


@dataclass(frozen=True)
class Base:
    """σ and σ' of one row of the table, in whatever precision they are given."""

    sigma: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    lower: float
    upper: float
    parameters: tuple[float, ...] = ()


def _sigmoid(u: Array) -> Array:
    small = np.exp(-np.abs(u))
    return np.where(u >= 0, 1, small) / (1 + small)


def _sigmoid_slope(u: Array) -> Array:
    return _sigmoid(u) * _sigmoid(-u)


def _srlu(a: float, b: float) -> Base:
    def parts(u: Array) -> tuple[Array, Array]:
        x = 0.5 * (a - b) * u * u
        return _sigmoid(x), _sigmoid(-x)

    def sigma(u: Array) -> Array:
        p, q = parts(u)
        return u * (a * p + b * q)

    def slope(u: Array) -> Array:
        p, q = parts(u)
        return a * p + b * q + ((a - b) * u) ** 2 * p * q

    return Base(sigma, slope, -math.inf, math.inf, (a, b))


def _torch_base(row: taut.Activation) -> Base:
    """A row this file does not know: its own functions, in float64."""

    def through(function: Callable) -> Callable[[Array], Array]:
        return lambda u: function(torch.from_numpy(np.asarray(u, np.float64))).numpy()

    lower, upper = row.range.bounds(torch.zeros((), dtype=torch.float64))
    return Base(through(row.sigma), through(row.slope), lower.item(), upper.item())


_BASES = {
    "exp": Base(np.exp, np.exp, 0.0, math.inf),
    "sigmoid": Base(_sigmoid, _sigmoid_slope, 0.0, 1.0),
    "tanh": Base(np.tanh, lambda u: 4 * _sigmoid_slope(2 * u), -1.0, 1.0),
    "linear": Base(lambda u: u, np.ones_like, -math.inf, math.inf),
    "srlu": _srlu(1.0, 0.0),
}


def known_base(base: Base) -> str | None:
    """The name of a base in the paper's table, None for another."""
    if base.parameters:
        return "srlu"
    return next((name for name, known in _BASES.items() if known is base), None)


@dataclass(frozen=True)
class Law:
    """One activation for K coordinates; `groups` says which coordinates follow which base."""

    label: str
    activation: taut.Activation
    groups: tuple[tuple[NDArray[np.int64], Base], ...]
    shift: Array
    scale: Array
    temperature: Array
    ends: tuple[Array, Array]  # the range of each coordinate

    def _each(self, u: Array, function: str) -> Array:
        x = u / self.temperature
        out = np.empty_like(x)
        with np.errstate(all="ignore"):
            for index, base in self.groups:
                out[..., index] = getattr(base, function)(x[..., index])
        return out

    def sigma(self, u: Array) -> Array:
        with np.errstate(all="ignore"):
            return self.shift + self.scale * self._each(u, "sigma")

    def slope(self, u: Array) -> Array:
        with np.errstate(all="ignore"):
            return self.scale / self.temperature * self._each(u, "slope")

    @property
    def size(self) -> Array:
        """Of the numbers that are added up in σ: what its rounding is measured by, besides z."""
        return np.abs(self.shift) + np.abs(self.scale)

    @property
    def straight(self) -> bool:
        """Is σ a line through 0 in each coordinate?"""
        lines = all(base is _BASES["linear"] for _, base in self.groups)
        return lines and not self.shift.any()

    @property
    def grows(self) -> NDArray[np.bool_]:
        """The coordinates whose σ is an exponential."""
        grows = np.zeros(len(self.shift), bool)
        for index, base in self.groups:
            grows[index] = base.sigma is np.exp
        return grows


@dataclass
class _Row:
    """A row under construction: the taut object, its three numbers (or vectors), and its ends.

    Not shift + scale·(ends of σ): d·upper is another number than d·lower + d·(upper − lower).
    """

    activation: taut.Activation
    base: Base
    lower: Array | float
    upper: Array | float
    shift: Array | float = 0.0
    scale: Array | float = 1.0
    temperature: Array | float = 1.0


_NUMBERS = ("shift", "scale", "temperature", "lower", "upper")


def draw_law(rng: Rng, label: str, K: int, dtype: type) -> Law:
    """A random activation of this kind for K coordinates; parameters are exact in `dtype`."""
    if label == "mixed":
        pool = [_draw(rng, _any_label(rng), 0, dtype) for _ in range(int(rng.integers(2, 6)))]
        members = rng.integers(len(pool), size=K)
        rows = [pool[m] for m in members]
        groups = tuple(
            (np.flatnonzero(members == m), pool[m].base) for m in range(len(pool)) if m in members
        )
        *numbers, lower, upper = (
            np.array([getattr(row, name) for row in rows], np.float64) for name in _NUMBERS
        )
        activation = activations.mixed([r.activation for r in rows])
        return Law(label, activation, groups, *numbers, (lower, upper))
    row = _draw(rng, label, K, dtype)
    *numbers, lower, upper = (
        np.broadcast_to(np.asarray(getattr(row, name), np.float64), (K,)).copy()
        for name in _NUMBERS
    )
    return Law(label, row.activation, ((np.arange(K), row.base),), *numbers, (lower, upper))


def law_of(label: str, K: int) -> Law:
    """An activation of the paper's table, as it stands there."""
    one, base = np.ones(K), _BASES[label]
    row, ends = activations.ACTIVATIONS[label], (base.lower * one, base.upper * one)
    return Law(label, row, ((np.arange(K), base),), 0 * one, one, one, ends)


def _any_label(rng: Rng) -> str:
    return LABELS[int(rng.integers(len(LABELS) - 1))]


def _draw(rng: Rng, label: str, K: int, dtype: type) -> _Row:
    """One row; K > 0 allows parameters that differ from coordinate to coordinate."""

    def number(low: float, high: float) -> Array | float:
        vector = K > 0 and rng.random() < 0.5
        value = 10.0 ** rng.uniform(low, high, size=K if vector else None)
        return np.asarray(value).astype(dtype).astype(np.float64)[()]

    if label == "bounded" and rng.random() < 0.4:
        return _draw_end(rng, dtype)
    if label == "bounded":
        lower = np.asarray(rng.normal() * 10.0 ** rng.uniform(-1, 2)).astype(dtype)[()]
        lower = float(lower)
        upper = np.asarray(lower + number(-1.5, 2)).astype(dtype).astype(np.float64)[()]
        row = activations.bounded(lower, _tensor(upper))
        return _Row(row, _BASES["sigmoid"], lower, upper, lower, upper - lower)
    if label in ("weighted", "tempered"):
        inner = _draw(rng, _any_label(rng), K, dtype)
        if label == "weighted":
            d = number(-2, 2)
            row = activations.weighted(inner.activation, _tensor(d))
            numbers = (inner.lower, inner.upper, inner.shift, inner.scale)
            return _Row(row, inner.base, *(d * x for x in numbers), inner.temperature)
        tau = number(-1, 1)
        row = activations.tempered(inner.activation, _tensor(tau))
        numbers = (inner.lower, inner.upper, inner.shift, inner.scale)
        return _Row(row, inner.base, *numbers, tau * inner.temperature)
    if label == "srlu" and rng.random() < 0.7:
        a, b = (float(np.asarray(x).astype(dtype)) for x in 10.0 ** rng.uniform(-1.5, 1, size=2))
        b = 0.0 if rng.random() < 0.3 else b
        return _Row(activations.srlu(a, b), _srlu(a, b), -math.inf, math.inf)
    row = activations.ACTIVATIONS[label]
    base = _BASES.get(label) or _torch_base(row)
    return _Row(row, base, base.lower, base.upper)


def _draw_end(rng: Rng, dtype: type) -> _Row:
    """`bounded` with one end at infinity, or with both at the same number."""
    end = float(np.asarray(rng.normal() * 10.0 ** rng.uniform(-1, 2)).astype(dtype))
    kind = rng.integers(3)
    if kind == 0:
        return _Row(activations.bounded(end, math.inf), _BASES["exp"], end, math.inf, end)
    if kind == 1:
        row = activations.bounded(-math.inf, end)
        return _Row(row, _BASES["exp"], -math.inf, end, end, -1.0, -1.0)
    return _Row(activations.bounded(end, end), _BASES["sigmoid"], end, end, end, 0.0)


def _tensor(x: Array | float) -> torch.Tensor | float:
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else float(x)

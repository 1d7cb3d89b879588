"""A block of inequalities or bounds: rebuilt from (seed, number, most samples) alone.

Size, activation, dtype and structure belong to the block; logits, sides, target, start and damage
to each sample. Every sample that a z was drawn for has a solution; of others nobody knows.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

import taut
from fuzzing.blocks import draw_logits, draw_starts, product
from fuzzing.laws import LABELS, Law, Rng, draw_law
from fuzzing.matrices import draw_matrices

Array = NDArray[np.floating]
Mask = NDArray[np.bool_]

# What sides are made from: a z inside; known multipliers; a z that just touches them; a z that they
# leave no room around; an end of what a row can reach; anything; nothing that is possible; NaN.
TARGETS = (
    "interior", "planted", "weak", "tight", "ends", "unknown", "infeasible", "nonfinite",
)  # fmt: skip
_SHARES = np.array([0.34, 0.14, 0.10, 0.10, 0.05, 0.12, 0.13, 0.02])
#: What G is; "bounds" has none.
STRUCTURES = {
    "rows": 0.28,
    "copies": 0.14,  # of other rows and of equations, scaled and turned around
    "implied": 0.14,  # one row is a combination of others
    "order": 0.10,  # differences of neighbours
    "boxes": 0.10,  # rows with one entry
    "both": 0.08,  # such rows, and others
    "bounds": 0.16,
}
_WITHOUT = ("extreme", "balances")  # of the kinds of A
_WORK = 1.5e6  # a measure of the work in a block
MOST = 1024  # samples of a block
_APART = 1e3  # singular values of rows that are far from dependent


@dataclass(frozen=True)
class Within:
    """n problems with A (n or 1, I, K), G (n or 1, M, K) or, for bounds on z, none.

    `truth` is the z that sides were made around; it is feasible where `feasible` says so.
    """

    seed: int
    number: int
    most: int
    law: Law
    dtype: type
    kind: str
    A: Array
    G: Array | None
    v: Array
    b: Array
    lower: Array
    upper: Array
    init: Array | None
    truth: Array
    target: NDArray[np.int64]
    start: NDArray[np.int64]
    logits: NDArray[np.int64]
    targets: ClassVar = TARGETS

    def __len__(self) -> int:
        return len(self.v)

    @property
    def shared(self) -> bool:
        return len(self.C) == 1 and len(self.v) > 1

    @property
    def eps(self) -> float:
        return float(np.finfo(self.dtype).eps)

    @property
    def feasible(self) -> Mask:
        return self.target <= TARGETS.index("ends")

    @property
    def promised(self) -> Mask:
        """Samples that must converge: calm ones, rows far from dependent, a solution inside."""
        limits = {"exp": 60, "sigmoid": 60, "tanh": 60, "srlu": 100, "linear": 1e6}
        if self.dtype is np.float32 or self.law.label not in limits:
            return np.zeros(len(self), bool)
        calm = np.abs(self.v).max(1) <= limits[self.law.label]
        tame = self.start != 3
        return self.finite & calm & tame & (self.target == 0) & (self._spread <= _APART)

    @property
    def _spread(self) -> Array:
        """How far the singular values of unit rows are apart, without those that are 0."""
        C = self.C.astype(np.float64)
        norms = np.linalg.norm(C, axis=2, keepdims=True)
        values = np.linalg.svd(C / np.where(norms > 0, norms, 1), compute_uv=False)
        most = values.max(1, initial=0, keepdims=True)
        least = np.where(values > 1e-13 * most, values, np.inf).min(1, initial=np.inf)
        return np.where(least < np.inf, most[:, 0] / least, 1)

    @property
    def C(self) -> Array:
        """[A; G]."""
        if self.G is None:
            return self.A
        n = max(len(self.A), len(self.G))
        parts = [np.broadcast_to(x, (n, *x.shape[1:])) for x in (self.A, self.G)]
        return np.concatenate(parts, 1)

    @property
    def sides(self) -> tuple[Array, Array]:
        """Of the rows of C."""
        if self.G is None:
            return self.b, self.b
        return tuple(np.concatenate([self.b, x], 1) for x in (self.lower, self.upper))

    @property
    def ends(self) -> tuple[Array, Array]:
        """Where z may lie: its range, and its bounds."""
        least, most = (np.broadcast_to(x, self.v.shape) for x in self.law.ends)
        if self.G is not None:
            return least, most
        return np.maximum(least, self.lower), np.minimum(most, self.upper)

    @property
    def finite(self) -> Mask:
        whole = [np.isfinite(x).all((1, 2)) for x in (self.A, self.G) if x is not None]
        fine = np.isfinite(self.v).all(1) & np.isfinite(self.b).all(1)
        fine &= (self.lower < np.inf).all(1) & (self.upper > -np.inf).all(1)
        for x in whole:
            fine = fine & x
        return fine

    def matrix(self, row: int) -> Array:
        return self.C[0 if len(self.C) == 1 else row]

    def take(self, rows: NDArray[np.int64]) -> dict[str, torch.Tensor | None]:
        """Some of the samples, as `taut.project` takes them."""
        every = len(rows) == len(self)

        def matrix(x: Array | None) -> Array | None:
            return x if x is None or (len(x) == 1 and (len(self) > 1 or not every)) else x[rows]

        given = {"A": matrix(self.A), "G": matrix(self.G)}
        given = {
            k: x[0] if x is not None and len(x) == 1 and len(self) > 1 else x
            for k, x in given.items()
        }
        given |= {k: getattr(self, k)[rows] for k in ("v", "b", "lower", "upper")}
        given["init"] = None if self.init is None else self.init[rows]
        if not self.A.shape[1] and self.number % 2:
            given["A"] = given["b"] = None
        return {k: None if x is None else torch.from_numpy(x.copy()) for k, x in given.items()}

    def tensors(self) -> dict[str, torch.Tensor | None]:
        return self.take(np.arange(len(self)))

    def one(self, row: int) -> dict[str, torch.Tensor | None]:
        """A sample alone, for a reproducer."""
        return self.take(np.array([row]))

    def project(self, tensors: dict[str, torch.Tensor | None]) -> taut.Solution:
        with warnings.catch_warnings():
            # Ill-conditioned on purpose; the status and the residual are what is looked at.
            warnings.simplefilter("ignore", taut.ConditionWarning)
            return taut.project(**tensors, activation=self.law.activation, on_failure="return")

    def solve(self) -> taut.Solution:
        return self.project(self.tensors())


def make_within(seed: int, number: int, most: int = MOST) -> Within:
    """The block of that number, at most `most` samples; nothing else decides what is in it."""
    rng = np.random.default_rng([seed, number, 15])
    dtype = np.float32 if rng.random() < 0.25 else np.float64
    K = int(np.exp(rng.uniform(0, np.log(60.99))))
    I = 0 if rng.random() < 0.25 else 1 + int(rng.random() ** 2 * max(1, K // 2))
    I = min(I, K)
    law = draw_law(rng, LABELS[number % len(LABELS)], K, dtype)
    kind = str(rng.choice(list(STRUCTURES), p=list(STRUCTURES.values())))
    M = 1 + int(rng.random() ** 1.5 * K)
    n = int(min(most, MOST, max(8, _WORK / (100 + (I + M) ** 2 * K**0.5))))
    own = rng.random(2) < 0.15
    A, G = _draw_rows(rng, kind, n, own, I, M, K, dtype)
    target = rng.choice(len(TARGETS), size=n, p=_SHARES / _SHARES.sum())
    v, logits = draw_logits(rng, n, law, dtype)
    drawn = _Draw(rng, law, A, G, v, dtype)
    truth, good, target = drawn.truth(target)
    b, lower, upper, target = drawn.sides(truth, good, target)
    C = (
        A
        if G is None
        else np.concatenate(
            [np.broadcast_to(x, (max(len(A), len(G)), *x.shape[1:])) for x in (A, G)], 1
        )
    )
    init, start = draw_starts(rng, C, good, dtype)
    v, b, lower, upper = _damage(rng, law, v, b, lower, upper, target == 7)
    given = (law, dtype, kind, A, G, v, b, lower, upper, init, truth, target, start, logits)
    return Within(seed, number, most, *given)


def _draw_rows(
    rng: Rng, kind: str, n: int, own: Mask, I: int, M: int, K: int, dtype: type
) -> tuple[Array, Array | None]:
    """A and G; each is one for all samples, or one for each."""
    wide = dtype is np.float64
    A = draw_matrices(rng, n if own[0] else 1, I, K, None, wide, _WITHOUT).A
    if kind == "bounds":
        return A.astype(dtype), None
    many = n if own[1] else 1
    G = draw_matrices(rng, many, M, K, None, wide, _WITHOUT).A
    if kind == "copies" and M > 1:
        pool = (
            G
            if I == 0 or len(A) > len(G)
            else np.concatenate([np.broadcast_to(A, (many, I, K)), G], 1)
        )
        for i in range(1, M):
            if rng.random() < 0.6:
                source = int(rng.integers(pool.shape[1] - M + i))
                G[:, i] = pool[:, source] * rng.choice([1, -1, 2, -0.5])
                pool[:, pool.shape[1] - M + i] = G[:, i]
    if kind == "implied" and M > 1:
        few = rng.permutation(M - 1)[: int(rng.integers(1, 4))]
        G[:, -1] = (rng.choice([-2, -1, 1, 2], size=(len(few), 1)) * G[:, few]).sum(1)
    if kind == "order" and K > 1:
        G = np.broadcast_to(np.diff(np.eye(K), axis=0)[:M], (many, min(M, K - 1), K)).copy()
    if kind in ("boxes", "both"):
        rows = M if kind == "boxes" else (M + 1) // 2
        single = np.eye(K)[rng.integers(K, size=rows)] * rng.choice(
            [1, -1, 2, -0.25], size=(rows, 1)
        )
        G[:, :rows] = single
    return A.astype(dtype), G.astype(dtype)


@dataclass(frozen=True)
class _Draw:
    """What a block is made of, while it is made."""

    rng: Rng
    law: Law
    A: Array
    G: Array | None
    v: Array
    dtype: type

    @property
    def _rows(self) -> Array:
        """The rows that have sides: those of G, or the outputs."""
        return np.eye(self.v.shape[1])[None] if self.G is None else self.G.astype(np.float64)

    def truth(self, target: NDArray[np.int64]) -> tuple[Array, Array, NDArray[np.int64]]:
        """A z for each sample, the multipliers that lead to it (NaN: unknown), and the targets."""
        rng, law, v = self.rng, self.law, self.v
        n, K = v.shape
        I, M = self.A.shape[1], 0 if self.G is None else self.G.shape[1]
        truth = law.sigma(law.temperature * rng.uniform(-2.5, 2.5, size=(n, K)))
        good = np.full((n, I + M), np.nan)
        ν = self._multipliers(n, I, M)
        pull = product(np.swapaxes(self.A, 1, 2), ν[:, :I])
        if self.G is not None:
            pull = pull + product(np.swapaxes(self.G, 1, 2), ν[:, I:])
        weak = (target == 2)[:, None]  # then the answer is σ(v), and all multipliers are 0
        ν, pull = np.where(weak, 0, ν), np.where(weak, 0, pull)
        there = law.sigma(v + pull)
        planted = ((target == 1) | (target == 2)) & (np.abs(there) < 1e25).all(1)
        target = np.where(((target == 1) | (target == 2)) & ~planted, 0, target)
        truth[planted], good[planted] = there[planted], ν[planted]
        if (target == 4).any():
            truth, target = self._at_ends(truth, target)
        return truth.astype(np.float64), good, target

    def _multipliers(self, n: int, I: int, M: int) -> Array:
        rng = self.rng
        norms = [
            np.linalg.norm(x.astype(np.float64), axis=2) for x in (self.A, self.G) if x is not None
        ]
        norms = np.concatenate([np.broadcast_to(x, (n, x.shape[1])) for x in norms], 1)
        size = 10.0 ** rng.uniform(-1, 1.5, size=(n, 1))
        ν = rng.normal(size=(n, I + M)) * size / np.where(norms > 0, norms, 1)
        off = (rng.random((n, I + M)) < 0.5) & (np.arange(I + M) >= I)
        return np.where(off, 0, ν)

    def _at_ends(self, truth: Array, target: NDArray[np.int64]) -> tuple[Array, NDArray[np.int64]]:
        """The outputs of one row where they make it least or most, if these ends are finite."""
        rng, n = self.rng, len(truth)
        rows = np.broadcast_to(self._rows, (n, *self._rows.shape[1:]))
        row = rows[np.arange(n), rng.integers(rows.shape[1], size=n)]
        row = row * rng.choice([-1, 1], size=(n, 1))
        end = np.where(row > 0, self.law.ends[1], np.where(row < 0, self.law.ends[0], truth))
        possible = np.isfinite(end).all(1)
        target = np.where((target == 4) & ~possible, 0, target)
        return np.where((target == 4)[:, None], end, truth), target

    def sides(
        self, truth: Array, good: Array, target: NDArray[np.int64]
    ) -> tuple[Array, Array, Array, NDArray[np.int64]]:
        """b, lower and upper."""
        rng, law, dtype, n = self.rng, self.law, self.dtype, len(truth)
        I = self.A.shape[1]
        b = product(self.A, truth).astype(dtype)
        r = product(self._rows, truth)
        M = r.shape[1]
        one = law.temperature * np.ones(truth.shape[1])
        spread = product(np.abs(self._rows), np.abs(law.sigma(one) - law.sigma(-one))[None] / 2)
        spread = np.broadcast_to(spread, r.shape).astype(np.float64) / truth.shape[1] ** 0.5
        gap = (
            rng.exponential(size=(2, n, M)) * 10.0 ** rng.uniform(-2, 0.3, size=(1, n, 1)) * spread
        )
        lower, upper = r - gap[0], r + gap[1]
        ν = good[:, I:] if self.G is not None else np.full_like(r, np.nan)
        with np.errstate(invalid="ignore"):
            lower, upper = np.where(ν > 0, r, lower), np.where(ν < 0, r, upper)
        touching = (target == 2)[:, None] & (rng.random(r.shape) < 0.5)
        side = rng.random(r.shape) < 0.5
        lower = np.where(touching & side, r, lower)
        upper = np.where(touching & ~side, r, upper)
        tight = (target == 3)[:, None] & (rng.random(r.shape) < 0.4)
        lower, upper = np.where(tight, r, lower), np.where(tight, r, upper)
        ends = (target == 4)[:, None]
        lower, upper = np.where(ends & side, r, lower), np.where(ends & ~side, r, upper)
        lower, upper = self._opened(lower, upper, ν, target)
        moved = 1.3 * spread * rng.normal(size=r.shape) * (target == 5)[:, None]
        lower, upper = lower + moved, upper + moved
        lower, upper = lower.astype(dtype), upper.astype(dtype)
        # Rounding to the dtype must not shut out the z that they were made around.
        low, high = (x.astype(dtype) for x in (r, r))
        inside = (target <= 3)[:, None] & ~tight
        lower = np.where(inside & (lower > low), low, lower)
        upper = np.where(inside & (upper < high), high, upper)
        return b, *self._impossible(b, lower, upper, r, target)

    def _opened(self, lower: Array, upper: Array, ν: Array, target: Array) -> tuple[Array, Array]:
        """Sides that are not there, alike in most samples; planted ones stay."""
        rng, (n, M) = self.rng, lower.shape
        pattern = np.where(
            rng.random((n, M)) < 0.8, rng.integers(6, size=M), rng.integers(6, size=(n, M))
        )
        with np.errstate(invalid="ignore"):
            keep = (ν != 0) & np.isfinite(ν) | (lower == upper)
        no_lower = ((pattern == 0) | (pattern == 1) | (pattern == 5)) & ~keep
        no_upper = ((pattern == 2) | (pattern == 3) | (pattern == 5)) & ~keep
        no_upper &= ~(no_lower & (pattern != 5))
        return np.where(no_lower, -np.inf, lower), np.where(no_upper, np.inf, upper)

    def _impossible(
        self, b: Array, lower: Array, upper: Array, r: Array, target: NDArray[np.int64]
    ) -> tuple[Array, Array, NDArray[np.int64]]:
        """Sides that cross, that are out of reach, or that others rule out."""
        rng, M = self.rng, lower.shape[1]
        least = 1e-6 if self.dtype is np.float64 else 1e-2
        lower, upper, rows = lower.copy(), upper.copy(), self._rows
        for i in np.flatnonzero(target == 6):
            j, G = int(rng.integers(M)), rows[0 if len(rows) == 1 else i]
            amount = 10.0 ** rng.uniform(np.log10(least), 0.5)
            positive, negative = np.maximum(G[j], 0), np.minimum(G[j], 0)
            with np.errstate(invalid="ignore"):
                parts = np.where(
                    G[j] == 0, 0, positive * self.law.ends[1] + negative * self.law.ends[0]
                )
            top = parts.sum()
            size = np.abs(G[j]).sum() + np.abs(parts[np.isfinite(parts)]).sum()
            choice = rng.integers(3)
            if choice == 0 and np.isfinite(top) and self.G is not None:
                lower[i, j] = top + amount * max(size, np.abs(top))
                upper[i, j] = np.inf
            elif choice == 1 and M > 1 and self._combination(G) is not None:
                index, weights = self._combination(G)
                for k, w in zip(index, weights, strict=True):
                    upper[i, k] = r[i, k] if w > 0 else upper[i, k]
                    lower[i, k] = r[i, k] if w < 0 else lower[i, k]
                    lower[i, k] = min(lower[i, k], upper[i, k])
                size = (np.abs(weights) * np.abs(r[i, index])).sum() + np.abs(G[-1]).max()
                lower[i, -1], upper[i, -1] = r[i, -1] + amount * size, np.inf
            else:
                middle = r[i, j] if np.isfinite(r[i, j]) else 0.0
                gap = amount * (np.abs(middle) + size)
                lower[i, j], upper[i, j] = middle + gap, middle - gap
        return lower, upper, target

    def _combination(self, G: Array) -> tuple[NDArray[np.int64], Array] | None:
        """The last row from the others, exactly or nearly; None where it is not one."""
        others = G[:-1]
        found, *_ = np.linalg.lstsq(others.T, G[-1], rcond=None)
        index = np.flatnonzero(np.abs(found) > 1e-9 * np.abs(found).max(initial=1))
        gap = np.abs(found @ others - G[-1]).max()
        if not len(index) or gap > 1e-12 * np.abs(G[-1]).max() or len(index) > 5:
            return None
        return index, found[index]


def _damage(
    rng: Rng, law: Law, v: Array, b: Array, lower: Array, upper: Array, where: Mask
) -> tuple[Array, Array, Array, Array]:
    """One NaN, or a side that asks for infinity."""
    for row in np.flatnonzero(where):
        place = rng.choice(["v", "b", "lower", "upper"])
        if place == "v" or (place == "b" and not b.shape[1]):
            v[row, rng.integers(v.shape[1])] = np.nan
        elif place == "b":
            b[row, rng.integers(b.shape[1])] = rng.choice([np.nan, np.inf, -np.inf])
        elif place == "lower":
            lower[row, rng.integers(lower.shape[1])] = rng.choice([np.nan, np.inf])
        else:
            upper[row, rng.integers(upper.shape[1])] = rng.choice([np.nan, -np.inf])
    return v, b, lower, upper

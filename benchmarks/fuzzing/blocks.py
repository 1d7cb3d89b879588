"""A block: a batch of random problems that is rebuilt from (seed, number, most samples) alone.

Size, activation, dtype and the kind of A belong to the block; logits, target, start and damage
(NaN, inf) to each sample, so that easy and hopeless samples share a batch.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

import taut
from fuzzing.laws import LABELS, Law, Rng, draw_law
from fuzzing.matrices import Matrices, draw_matrices

Array = NDArray[np.floating]

# What b is made from. All but the last three are feasible by construction. In "ends" an equation
# is at an end of what it can reach.
TARGETS = (
    "interior", "planted", "edge", "ends", "boundary", "infeasible", "inconsistent", "nonfinite",
)  # fmt: skip
_SHARES = np.array([0.36, 0.14, 0.10, 0.06, 0.08, 0.14, 0.09, 0.03])
STARTS = ("none", "zero", "good", "random", "absurd")
LOGITS = ("≤10", "≤60", "≤1000", "≤1e6")
_WORK = 6e7  # multiplications in one Hessian of the whole block
_MEMORY = 3e6  # entries of A
MOST = 2048  # samples of a block
_TABLES = 16  # one block in so many has the margins of a table


@dataclass(frozen=True)
class Block:
    """n problems v (n, K), A (n, I, K) or (1, I, K) when shared, b (n, I), and where they are from.

    `truth` is the z that b was made from; `target`, `start`, `logits` index the tuples above.
    """

    seed: int
    number: int
    most: int
    law: Law
    dtype: type
    kind: str
    A: Array
    v: Array
    b: Array
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
        return len(self.A) == 1 and not (len(self.v) == 1)

    @property
    def eps(self) -> float:
        return float(np.finfo(self.dtype).eps)

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """Samples whose b is A·truth, rounded, with truth in the (closed) range."""
        return self.target <= TARGETS.index("boundary")

    @property
    def finite(self) -> NDArray[np.bool_]:
        with np.errstate(all="ignore"):
            whole = np.isfinite(self.A).all((1, 2))
        return np.isfinite(self.v).all(1) & np.isfinite(self.b).all(1) & whole

    def matrix(self, row: int) -> Array:
        return self.A[0 if len(self.A) == 1 else row]

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """v, A, b and init as `taut.project` takes them."""
        A = self.A[0] if self.shared else self.A
        given = {"v": self.v, "A": A, "b": self.b, "init": self.init}
        return {k: None if x is None else torch.from_numpy(x.copy()) for k, x in given.items()}

    def project(self, tensors: dict[str, torch.Tensor | None]) -> taut.Solution:
        with warnings.catch_warnings():
            # Ill-conditioned on purpose; the status and the residual are what is looked at.
            warnings.simplefilter("ignore", taut.ConditionWarning)
            return taut.project(**tensors, activation=self.law.activation, on_failure="return")

    def prepare(self) -> taut.Prepared:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", taut.ConditionWarning)
            return taut.prepare(self.tensors()["A"], self.law.activation)

    def solve(self) -> taut.Solution:
        return self.project(self.tensors())

    def one(self, row: int) -> dict[str, torch.Tensor | None]:
        """A single sample, for a reproducer."""
        given = {"v": self.v[row], "A": self.matrix(row), "b": self.b[row]}
        init = None if self.init is None else self.init[row]
        given["init"] = init
        return {k: None if x is None else torch.from_numpy(x.copy()) for k, x in given.items()}


def make_block(seed: int, number: int, most: int = MOST) -> Block:
    """The block of that number, at most `most` samples; nothing else decides what is in it."""
    rng = np.random.default_rng([seed, number])
    dtype = np.float32 if rng.random() < 0.3 else np.float64
    K, I = _draw_size(rng)
    law = draw_law(rng, LABELS[number % len(LABELS)], K, dtype)
    shared = bool(rng.random() < 0.75)
    n = int(min(most, max(8, _WORK / (1 + I * I * K + 500 * I))))
    n = n if shared else int(min(n, max(8, _MEMORY / (1 + I * K))))
    wide = dtype is np.float64
    facing = _facing(rng, law)
    matrices = draw_matrices(
        rng, 1 if shared else n, I, K, facing, wide, tables=number % _TABLES == 5
    )
    A = matrices.A.astype(dtype)
    target = _draw_targets(rng, n, law, matrices)
    v, logits = draw_logits(rng, n, law, dtype)
    truth, good, target = _draw_truth(rng, law, matrices, A, v, target)
    if matrices.kind == "balances":
        v, truth = _balance(rng, law, v, truth, target)
    if matrices.kind == "margins":
        truth = _spread(rng, law, A, truth, target)
    b = product(A, truth).astype(dtype)
    if matrices.left is not None:
        b = _contradict(rng, matrices.left, b, target, dtype)
    init, start = draw_starts(rng, A, good, dtype)
    A, v, b = _damage(rng, law, A, v, b, target == TARGETS.index("nonfinite"))
    kind = matrices.kind
    return Block(seed, number, most, law, dtype, kind, A, v, b, init, truth, target, start, logits)


def _draw_size(rng: Rng) -> tuple[int, int]:
    K = int(np.exp(rng.uniform(0, np.log(200.99))))
    if rng.random() < 0.04:
        return K, 0
    if rng.random() < 0.06:
        return K, K
    return K, min(K, 1 + int(K * rng.random() ** 2))


def _facing(rng: Rng, law: Law) -> NDArray[np.int8] | None:
    """Signs that turn every coordinate towards a finite end, 0 where there is none."""
    lower, upper = law.ends
    low, high = np.isfinite(lower), np.isfinite(upper)
    signs = np.where(low & ~high, -1, np.where(high & ~low, 1, np.where(low, 1, 0)))
    wanted = rng.random() < 0.6 and not (low & high).all() and (low | high).any()
    return signs.astype(np.int8) if wanted else None


def _draw_targets(rng: Rng, n: int, law: Law, matrices: Matrices) -> NDArray[np.int64]:
    shares = _SHARES.copy()
    lower, upper = law.ends
    ended = np.isfinite(lower) | np.isfinite(upper)
    edged = matrices.cone >= 0 or (np.isfinite(lower) & np.isfinite(upper)).all()
    if not edged or matrices.A.shape[1] == 0:
        shares[[TARGETS.index("edge"), TARGETS.index("infeasible")]] = 0
    if not ended.any():
        shares[[TARGETS.index("boundary"), TARGETS.index("ends")]] = 0
    if matrices.left is None:
        shares[TARGETS.index("inconsistent")] = 0
    return rng.choice(len(TARGETS), size=n, p=shares / shares.sum())


def draw_logits(rng: Rng, n: int, law: Law, dtype: type) -> tuple[Array, NDArray[np.int64]]:
    straight = not np.isfinite(np.concatenate(law.ends)).any()
    top = 6.0 if straight and law.label != "srlu" else 3.0
    size = 10.0 ** rng.uniform(0, top, size=(n, 1))
    unit = rng.uniform(-1, 1, size=(n, len(law.shift)))
    # Logits of a tempered row are measured in its temperature, on half of the blocks.
    v = size * unit * (law.temperature if rng.random() < 0.5 else 1.0)
    bins = np.searchsorted([10, 60, 1000], size[:, 0])
    return v.astype(dtype), bins


def product(A: Array, z: Array) -> Array:
    """A z in extended precision; A is (n, I, K) or (1, I, K)."""
    wide = np.longdouble
    with np.errstate(all="ignore"):
        return np.matmul(A.astype(wide), z.astype(wide)[..., None])[..., 0]


def _draw_truth(
    rng: Rng, law: Law, matrices: Matrices, A: Array, v: Array, target: NDArray[np.int64]
) -> tuple[Array, Array, NDArray[np.int64]]:
    """The z that b is made from, the multipliers near which the answer lies (NaN: unknown)."""
    n, K = v.shape
    I = A.shape[1]
    norms = np.linalg.norm(A.astype(np.float64), axis=2)
    norms = np.where(norms > 0, norms, 1)
    interior = law.sigma(law.temperature * rng.uniform(-2.5, 2.5, size=(n, K)))
    truth, good = interior.copy(), np.full((n, I), np.nan)
    planted = target == TARGETS.index("planted")
    size = 10.0 ** rng.uniform(-1, 2, size=(n, 1))
    multipliers = rng.normal(size=(n, I)) * size / norms
    u = v + np.matmul(A.mT.astype(np.longdouble), multipliers[..., None])[..., 0]
    there = law.sigma(u)
    planted &= (np.abs(there) < 1e25).all(1)
    target = np.where((target == TARGETS.index("planted")) & ~planted, 0, target)
    truth[planted], good[planted] = there[planted], multipliers[planted]
    if I:
        extreme, y = _extreme(rng, law, matrices, A, norms, interior)
        gap = 10.0 ** rng.uniform(-10, -1, size=(n, 1))
        edge, beyond = (target == TARGETS.index(t) for t in ("edge", "infeasible"))
        truth[edge] = (extreme + gap * (interior - extreme))[edge]
        width = np.abs(y * np.where(np.isfinite(extreme), extreme, 0)).sum(1, keepdims=True)
        length = (y * y).sum(1, keepdims=True)
        push = (
            10 * gap * (np.abs(y).sum(1, keepdims=True) + width) / np.where(length > 0, length, 1)
        )
        truth[beyond] = (extreme + push * y)[beyond]
        ends = target == TARGETS.index("ends")
        truth[ends] = _ends_of_a_row(rng, law, A, interior)[ends]
    boundary = target == TARGETS.index("boundary")
    truth[boundary] = _at_ends(rng, law, interior)[boundary]
    return truth, good, target


def _extreme(
    rng: Rng, law: Law, matrices: Matrices, A: Array, norms: Array, interior: Array
) -> tuple[Array, Array]:
    """The z in the range furthest along y = Aᵀλ for a λ that has such a z, and that y."""
    n, I = len(interior), A.shape[1]
    if matrices.cone >= 0:
        multipliers = np.zeros((n, I))
        multipliers[:, matrices.cone] = 1
        multipliers = multipliers / norms
    else:
        multipliers = rng.normal(size=(n, I)) / norms
    y = np.matmul(A.mT.astype(np.float64), multipliers[..., None])[..., 0]
    lower, upper = law.ends
    end = np.where(y > 0, upper, np.where(y < 0, lower, interior))
    return np.where(np.isfinite(end), end, interior), y


def _ends_of_a_row(rng: Rng, law: Law, A: Array, interior: Array) -> Array:
    """The outputs of one equation where they make it least or most, if these ends are finite."""
    n, I = len(interior), A.shape[1]
    row = np.broadcast_to(A, (n, *A.shape[1:]))[np.arange(n), rng.integers(I, size=n)]
    row = row * rng.choice([-1, 1], size=(n, 1))
    end = np.where(row > 0, law.ends[1], np.where(row < 0, law.ends[0], interior))
    return np.where(np.isfinite(end).all(1, keepdims=True), end, interior)


def _balance(
    rng: Rng, law: Law, v: Array, truth: Array, target: NDArray[np.int64]
) -> tuple[Array, Array]:
    """Of interior samples: in and out alike, so that b is 0, and with exp, flows of any size."""
    inside, K = target == 0, v.shape[1] // 2 * 2
    alike = all((x[0:K:2] == x[1:K:2]).all() for x in law.ends)
    if not alike:
        return v, truth
    truth = truth.copy()
    truth[inside, 1:K:2] = truth[inside, 0:K:2]
    size = np.log(10) * rng.uniform(-9, 3, size=(len(v), K // 2)).repeat(2, axis=1)
    size = size * law.temperature[:K] * law.grows[:K] * inside[:, None]
    moved = v.copy()
    moved[:, :K] = np.clip(v[:, :K], -10, 10) * inside[:, None] + v[:, :K] * ~inside[:, None]
    moved[:, :K] += size.astype(v.dtype)
    return moved, truth


def _spread(rng: Rng, law: Law, A: Array, truth: Array, target: NDArray[np.int64]) -> Array:
    """Of interior samples, at a finite lower end: rows and columns that differ by up to 1e12."""
    n, I = len(truth), A.shape[1]
    decades = rng.uniform(0, 6, size=(n, 1)) * rng.random((n, I)) * (target == 0)[:, None]
    lower = law.ends[0]
    low = np.where(np.isfinite(lower), lower, truth)
    share = 10.0 ** -np.matmul(np.abs(A).mT, decades[..., None])[..., 0]
    return low + (truth - low) * share


def _at_ends(rng: Rng, law: Law, interior: Array) -> Array:
    """Some coordinates, or all but one, at an end of their range."""
    lower, upper = law.ends
    draw, share = rng.random(interior.shape), rng.choice([0.1, 0.5, 1.0], size=(len(interior), 1))
    side = np.where(rng.random(interior.shape) < 0.7, lower, upper)
    side = np.where(np.isfinite(side), side, np.where(np.isfinite(lower), lower, upper))
    return np.where((draw < share) & np.isfinite(side), side, interior)


def _contradict(rng: Rng, left: Array, b: Array, target: NDArray[np.int64], dtype: type) -> Array:
    """Move b out of the range of A, by a clear amount, where that is the target."""
    where = np.flatnonzero(target == TARGETS.index("inconsistent"))
    smallest = -2.0 if dtype is np.float32 else -6.0
    column = left[:, rng.integers(left.shape[1], size=len(where))].T
    amount = 10.0 ** rng.uniform(smallest, 1, size=(len(where), 1))
    size = np.abs(b[where]).max(1, keepdims=True)
    direction = column / np.abs(column).max(1, keepdims=True)
    b[where] += (amount * np.where(size > 0, size, 1) * direction).astype(dtype)
    return b


def draw_starts(
    rng: Rng, A: Array, good: Array, dtype: type
) -> tuple[Array | None, NDArray[np.int64]]:
    n, I = good.shape
    if rng.random() < 0.5:
        return None, np.zeros(n, np.int64)
    start = rng.choice([1, 2, 3, 4], size=n, p=[0.3, 0.3, 0.2, 0.2])
    known = np.isfinite(good).all(1)
    start = np.where((start == 2) & ~known, 1, start)
    norms = np.linalg.norm(A.astype(np.float64), axis=2)
    random = rng.normal(size=(n, I)) / np.where(norms > 0, norms, 1)
    random = random * 10.0 ** rng.uniform(-1, 2.5, size=(n, 1))
    near = good * (1 + 1e-3 * rng.normal(size=(n, I)))
    absurd = rng.choice([np.inf, -np.inf, np.nan, 1e30, -1e30, 1e12, 0.0], size=(n, I))
    options = [np.zeros((n, I)), np.zeros((n, I)), near, random, absurd]
    init = np.select([(start == i)[:, None] for i in range(5)], options)
    return init.astype(dtype), start


def _damage(
    rng: Rng, law: Law, A: Array, v: Array, b: Array, where: NDArray[np.bool_]
) -> tuple[Array, Array, Array]:
    """Put one NaN or inf into v, b or (where it belongs to the sample alone) A.

    v = ±inf at a finite end of the range is no damage: it holds the output there.
    """
    n, I, K = len(v), A.shape[1], A.shape[2]
    for row in np.flatnonzero(where):
        value = rng.choice([np.nan, np.inf, -np.inf])
        place = rng.choice(["v", "b", "A"])
        if place == "A" and len(A) == n and n > 1 and I:
            A[row, rng.integers(I), rng.integers(K)] = value
        elif place == "b" and I:
            b[row, rng.integers(I)] = value
        else:
            k = rng.integers(K)
            end = law.ends[int(value > 0)][k]
            v[row, k] = np.nan if np.isfinite(end) else value
    if len(A) == 1 and I and rng.random() < 0.005:
        A[0, rng.integers(I), rng.integers(K)] = np.nan
    return A, v, b

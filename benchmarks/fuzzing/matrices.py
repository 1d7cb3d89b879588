"""The kinds of A the fuzzer draws."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fuzzing.laws import Rng

Array = NDArray[np.float64]

KINDS = {
    "dense": 0.25,  # normal entries
    "whole": 0.15,  # −1, 0, 1: incidences and sums; A z* is then often exact
    "scaled": 0.12,  # rows up to 1e8 apart
    "extreme": 0.06,  # rows up to 1e300 apart, 1e30 in float32
    "units": 0.10,  # columns up to 1e8 apart: outputs in kilograms and in tons
    "balances": 0.07,  # as much in as out, of large flows and of traces; b is often 0
    "conditioned": 0.10,  # singular values up to 1e8 apart
    "redundant": 0.15,  # rows that are combinations of others, copies or zero
}


@dataclass(frozen=True)
class Matrices:
    """n matrices (or one, n = 1) of one kind.

    `left` spans what redundant rows must agree on: leftᵀA = 0 (to rounding) with one column for
    each redundant row, None where there are none. `cone` is the row kept one-signed, or −1.
    """

    kind: str
    A: Array
    left: Array | None
    cone: int


def draw_matrices(
    rng: Rng,
    n: int,
    I: int,
    K: int,
    facing: NDArray[np.int8] | None,
    wide: bool,
    without: tuple[str, ...] = (),
    tables: bool = False,
) -> Matrices:
    """n random (I, K) matrices. `facing` (K,) asks for a first row with these signs (0: zero).

    Such a row gives half-infinite ranges an edge that b can be put at or beyond. `wide` says that
    the numbers are of float64, `without` are kinds that are not wanted. With `tables` they are
    margins, where there are outputs enough.
    """
    shares = np.array([0.0 if kind in without else share for kind, share in KINDS.items()])
    kind = str(rng.choice(list(KINDS), p=shares / shares.sum()))
    if I == 0:
        return Matrices("dense", np.zeros((n, 0, K)), None, -1)
    if kind == "redundant" and I > 1:
        return _redundant(rng, n, I, K, facing)
    if kind == "conditioned":
        return Matrices(kind, _conditioned(rng, n, I, K), None, -1)
    if kind == "balances" and K > 1:
        return Matrices(kind, _balances(n, min(I, K // 2), I, K), None, -1)
    if tables and I > 2 and K >= (I // 2) * ((I + 1) // 2 + 1):
        return _margins(rng, n, I, K)
    A = _whole(rng, n, I, K) if kind == "whole" else rng.normal(size=(n, I, K))
    cone = _face(A, facing)
    if kind == "scaled":
        A = A * 10.0 ** rng.uniform(-4, 4, size=(n, I, 1))
    if kind == "extreme":
        A = A * 10.0 ** ((150 if wide else 15) * rng.uniform(-1, 1, size=(n, I, 1)))
    if kind == "units":
        A = A * 10.0 ** rng.uniform(-4, 4, size=(n, 1, K))
    return Matrices(
        "dense" if kind in ("redundant", "balances", "margins") else kind, A, None, cone
    )


def _face(A: Array, facing: NDArray[np.int8] | None) -> int:
    if facing is None:
        return -1
    A[:, 0] = np.maximum(np.abs(A[:, 0]), 0.25) * facing
    return 0


def _whole(rng: Rng, n: int, I: int, K: int) -> Array:
    A = rng.integers(-1, 2, size=(n, I, K)).astype(np.float64)
    if rng.random() < 0.5:
        A = np.abs(A)
    # A pattern with independent rows: each row owns a column.
    place = np.arange(I)
    A[:, :, :I] = np.triu(A[:, :, :I])
    A[:, place, place] = 1
    return A


def _balances(n: int, pairs: int, I: int, K: int) -> Array:
    """Row i: outputs 2i, 2i + 2I', … less outputs 2i + 1, …; rows beyond I' are empty."""
    A = np.zeros((n, I, K))
    for k in range(K // 2 * 2):
        A[:, k // 2 % pairs, k] = 1 - 2 * (k % 2)
    return A


def _margins(rng: Rng, n: int, I: int, K: int) -> Matrices:
    """Tables of I rows and columns, or of I + 1 without the last; further outputs are free."""
    whole = rng.random() < 0.6
    rows = I // 2
    columns = I - rows + (not whole)
    cell = np.arange(rows * columns)
    A = np.zeros((n, rows + columns, K))
    A[:, cell // columns, cell] = 1
    A[:, rows + cell % columns, cell] = 1
    left = np.concatenate([np.ones((rows, 1)), -np.ones((columns, 1))])
    return Matrices("margins", A[:, :I], left if whole else None, -1)


def _conditioned(rng: Rng, n: int, I: int, K: int) -> Array:
    left = np.linalg.qr(rng.normal(size=(n, I, I)))[0]
    right = np.linalg.qr(rng.normal(size=(n, K, I)))[0]
    worst = rng.uniform(2, 8, size=(n, 1))
    values = 10.0 ** (-worst * np.sort(rng.random((n, I)), axis=-1))
    return (left * values[:, None, :]) @ right.mT


def _redundant(rng: Rng, n: int, I: int, K: int, facing: NDArray[np.int8] | None) -> Matrices:
    """r independent rows, then I − r combinations of them with small whole coefficients."""
    r = int(rng.integers(1, I))
    whole = rng.random() < 0.5
    basis = _whole(rng, n, r, K) if whole else rng.normal(size=(n, r, K))
    cone = _face(basis, facing)
    mix = rng.integers(-2, 3, size=(I - r, r)).astype(np.float64)
    if rng.random() < 0.5:  # copies of rows, and a zero row now and then
        mix = np.zeros((I - r, r))
        mix[np.arange(I - r), rng.integers(r, size=I - r)] = 1
        mix[0] *= rng.random() < 0.8
    A = np.concatenate([basis, mix @ basis], axis=1)
    left = np.concatenate([-mix.T, np.eye(I - r)])
    if rng.random() < 0.3:
        # Powers of two keep the redundancy as exact as it was.
        scale = 2.0 ** rng.integers(-13, 14, size=I)
        A, left = A * scale[:, None], left / scale[:, None]
    return Matrices("redundant", A, left, cone)

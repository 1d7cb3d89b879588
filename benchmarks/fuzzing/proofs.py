"""What is too slow for every sample and is checked on some.

- certificates in exact rational arithmetic; `extremes` has those of extreme numbers;
- feasibility by SciPy's HiGHS, a linear program;
- z by a second method: SciPy's Levenberg-Marquardt on orthonormal rows from another start,
  polished with a residual in extended precision.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, root

from fuzzing.blocks import Block
from fuzzing.checks import TOLERANCE, Answer
from taut import Status

Array = NDArray[np.floating]

_EXACT, _LINEAR, _SECOND = 8, 4, 4  # samples of each kind looked at in a block
_EXACT_SIZE, _LINEAR_SIZE, _SECOND_SIZE = 4000, 6000, 400  # largest I·K for them


@dataclass
class Proofs:
    """Failures (row, check) and what was counted on the way."""

    failures: list[tuple[int, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


def prove(block: Block, answer: Answer) -> Proofs:
    """Look closely at a few samples of the block, the same ones every time."""
    rng = np.random.default_rng([block.seed, block.number, 1])
    proofs = Proofs()
    size = block.A.shape[1] * block.A.shape[2]

    def sample(mask: NDArray[np.bool_], most: int, limit: int) -> list[int]:
        where = np.flatnonzero(mask & block.finite)
        if size > limit or not len(where):
            return []
        return [int(r) for r in rng.permutation(where)[:most]]

    infeasible = answer.are(Status.INFEASIBLE)
    # A feasible sample whose b was rounded out of the range is possible; only a proof excuses it.
    contested = infeasible & block.feasible
    rows = sample(infeasible, _EXACT, _EXACT_SIZE) + sample(contested, 50, 10**9)
    for row in dict.fromkeys(rows):
        _exact(block, answer, row, proofs)
    for row in sample(infeasible, _LINEAR, _LINEAR_SIZE):
        verdict = linear_program(block, row)
        proofs.count(f"HiGHS on INFEASIBLE: {verdict}")
    for row in sample(answer.are(Status.MAX_ITERATIONS), _LINEAR, _LINEAR_SIZE):
        proofs.count(f"HiGHS on MAX_ITERATIONS: {linear_program(block, row)}")
    calm = np.abs(block.v).max(1) <= 60 * np.abs(block.law.temperature).max()
    for row in sample(answer.are(Status.CONVERGED) & calm, _SECOND, _SECOND_SIZE):
        _compare(block, answer, row, proofs)
    return proofs


def _exact(block: Block, answer: Answer, row: int, proofs: Proofs) -> None:
    if exact_certificate(block, answer.multipliers[row], row):
        # b = A z of an edge sample is rounded, and may leave the range by that.
        where = ", b rounded out of the range" if block.feasible[row] else ""
        proofs.count(f"exact proof of INFEASIBLE{where}")
    else:
        proofs.failures.append((row, "INFEASIBLE: the certificate holds in exact arithmetic"))


def exact_certificate(block: Block, multipliers: Array, row: int) -> bool:
    """Do the multipliers prove that a sample of the block has no solution?"""
    return exact_proof(multipliers, block.matrix(row), block.b[row], *block.law.ends)


def exact_proof(multipliers: Array, A: Array, b: Array, least: Array, most: Array) -> bool:
    """bᵀλ > Σ sup{(Aᵀλ)_k z : least ≤ z ≤ most} in rational numbers."""
    return exact_claim(multipliers, A, (b, b), (least, most), math.inf)


def exact_claim(multipliers: Array, C: Array, sides: tuple, ends: tuple, radius: float) -> bool:
    """Σ side ν > Σ sup{(Cᵀν)_k z : least ≤ z ≤ most, |z| ≤ radius} in rational numbers."""
    if not np.isfinite(multipliers).all() or not np.isfinite(C).all():
        return False
    least, most = np.maximum(ends[0], -radius), np.minimum(ends[1], radius)
    if (least > most).any():
        return True
    weights = [Fraction(float(x)) for x in multipliers]
    gain = Fraction()
    for w, lower, upper in zip(weights, *sides, strict=True):
        side = float(lower if w > 0 else upper)
        if w != 0 and not math.isfinite(side):
            return False
        gain += w * Fraction(side) if w != 0 else 0
    for column, lower, upper in zip(C.T, least, most, strict=True):
        y = sum((w * Fraction(float(a)) for w, a in zip(weights, column, strict=True)), Fraction())
        end = float(upper if y > 0 else lower)
        if y != 0 and math.isinf(end):
            return False
        gain -= y * Fraction(end) if y != 0 else 0
    return gain > 0


def linear_program(block: Block, row: int) -> str:
    """How deep inside the range some z with A z = b can lie: interior, edge or infeasible.

    Maximises t with lower + t·unit ≤ z ≤ upper − t·unit, rows of A scaled to length 1.
    """
    A, b = block.matrix(row).astype(np.float64), block.b[row].astype(np.float64)
    norms = np.linalg.norm(A, axis=1)
    norms = np.where(norms > 0, norms, 1)
    A, b = A / norms[:, None], b / norms
    K = A.shape[1]
    lower, upper = block.law.ends
    width = np.where(np.isfinite(upper - lower), upper - lower, 1.0)
    rows, right = [], []
    for k in range(K):
        for end, sign in ((lower[k], -1.0), (upper[k], 1.0)):
            if np.isfinite(end):
                line = np.zeros(K + 1)
                line[k], line[K] = sign, width[k]
                rows.append(line)
                right.append(sign * end)
    return deepest(rows, right, A, b, (-1e3, 0.5))


def deepest(rows: list, right: list, A: Array, b: Array, depths: tuple) -> str:
    """Is there a z with A z = b and rows·(z, depth) ≤ right? By HiGHS: as deep as can be."""
    K = A.shape[1]
    found = linprog(
        [0.0] * K + [-1.0],
        A_ub=np.array(rows) if rows else None,
        b_ub=np.array(right) if rows else None,
        A_eq=np.hstack([A, np.zeros((len(A), 1))]),
        b_eq=b,
        bounds=[(None, None)] * K + [depths],
        method="highs",
    )
    if found.status == 2:
        return "infeasible"
    if found.status != 0:
        return "no answer"
    depth = -found.fun
    return "interior" if depth > 1e-6 else "edge" if depth > -1e-6 else "infeasible"


def _compare(block: Block, answer: Answer, row: int, proofs: Proofs) -> None:
    other = second_method(block, row)
    if other is None:
        proofs.count("second method: no answer")
        return
    z, slack = other
    proofs.count("second method: compared")
    if not (np.abs(answer.z[row] - z) <= slack).all():
        proofs.failures.append((row, "CONVERGED: z is that of a second method"))


def second_method(block: Block, row: int) -> tuple[Array, Array] | None:
    """z and by how much taut's may differ from it; None where this method does not get there."""
    law, b = block.law, block.b[row].astype(np.float64)
    A, v = block.matrix(row).astype(np.float64), block.v[row].astype(np.float64)
    if not len(A):
        z = law.sigma(v)
        return z, 64 * block.eps * (law.size + np.abs(z) * (1 + np.abs(v)))
    norms = np.linalg.norm(A, axis=1)
    norms = np.where(norms > 0, norms, 1)
    left, values, right = np.linalg.svd(A / norms[:, None], full_matrices=False)
    live = values > 1e-10 * values[0]
    if values[0] > 1e4 * values[live].min(initial=values[0]) or values[0] == 0:
        return None
    # Orthonormal rows Q = back·A: the same set of z, in other coordinates.
    Q, back = right[live], (left[:, live] / values[live]).T / norms
    start = np.random.default_rng([block.seed, block.number, row]).normal(size=len(Q)) - Q @ v
    goal = back @ b

    def gap(x: Array) -> Array:
        return np.nan_to_num(Q @ law.sigma(v + Q.T @ x) - goal, posinf=1e200, neginf=-1e200)

    def jacobian(x: Array) -> Array:
        return np.nan_to_num((Q * law.slope(v + Q.T @ x)) @ Q.T, posinf=1e200)

    with np.errstate(all="ignore"):
        found = root(gap, start, jac=jacobian, method="lm", options={"maxiter": 2000})
        return _polish(block, row, Q, back, found.x)


def _polish(block: Block, row: int, Q: Array, back: Array, x: Array) -> tuple[Array, Array] | None:
    """Newton on Q σ(v + Qᵀx) = back·b, the residual in extended precision."""
    law, v, b = block.law, block.v[row].astype(np.longdouble), block.b[row].astype(np.float64)
    goal = back.astype(np.longdouble) @ b.astype(np.longdouble)
    wide = Q.astype(np.longdouble)
    for _ in range(30):
        u = v + x @ wide
        z = law.sigma(u)
        residual = wide @ z - goal
        slope = law.slope(u).astype(np.float64)
        hessian = (Q * slope) @ Q.T
        if not np.isfinite(hessian).all() or np.linalg.cond(hessian) > 1e8:
            return None
        x = x - np.linalg.solve(hessian, residual.astype(np.float64))
    if not (np.abs(residual) <= 1e-16 * (np.abs(goal) + np.abs(wide) @ np.abs(z))).all():
        return None
    # A residual r moves z by W Qᵀ H⁻¹ back·r; r may be what a CONVERGED sample is allowed.
    A, z = np.abs(block.matrix(row).astype(np.float64)), z.astype(np.float64)
    size = slope * (np.abs(u) + np.abs(v) + A.T @ np.abs(back.T @ x)).astype(np.float64)
    allowed = TOLERANCE[block.dtype] * (np.abs(b) + A @ np.abs(z)) + 64 * block.eps * (A @ size)
    shifts = np.abs(Q.T @ np.linalg.solve(hessian, back))
    if (shifts @ allowed > 0.1).any():
        return None  # u itself may differ by so much that slopes do: next to an end
    moves = slope[:, None] * shifts
    own = 64 * block.eps * (law.size + np.abs(z) + size)
    slack = 4 * (moves @ allowed) + own
    return (z, slack) if np.isfinite(slack).all() else None  # pinned at their ends

"""Inequalities and bounds: what is checked on every sample, and what on a few.

The conditions of optimality are sufficient: a z that keeps the sides, is clip(σ(v + Cᵀν)), and
whose ν are signed and 0 off their sides is the answer. All is recomputed in extended precision.
"""

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

import taut
from fuzzing.checks import TOLERANCE, Answer, dot
from fuzzing.proofs import deepest, exact_claim
from fuzzing.within import Within
from taut import Status

Array = NDArray[np.floating]
Mask = NDArray[np.bool_]

_FEW = 32  # multiples of eps for the rounding of one operation
_EXACT, _LINEAR, _ALONE = 6, 3, 4  # samples of a block that are looked at closely
_FAR = 1e8  # what a radius must be at least


def check_optimal(block: Within, answer: Answer, solution: taut.Solution) -> dict[str, Mask]:
    """Every check that costs little, by name; samples where it fails are True."""
    with np.errstate(all="ignore"):
        return {
            **_check_damage(block, answer),
            **_check_sides(block, answer),
            **_check_point(block, answer),
            **_check_active(block, answer, solution.active.numpy()),
            **_check_proofs(block, answer, solution),
        }


def _check_damage(block: Within, answer: Answer) -> dict[str, Mask]:
    named = answer.are(Status.NONFINITE)
    numbers = np.isfinite(answer.z).all(1) & np.isfinite(answer.multipliers).all(1)
    return {
        "NONFINITE is said of what is not finite": ~block.finite & ~named,
        "NONFINITE is said of finite input only where it overflows": (
            named & block.finite & ~_overflows(block)
        ),
        "z and multipliers are finite unless NONFINITE": block.finite & ~named & ~numbers,
        "INCONSISTENT is not said of what has a solution": (
            answer.are(Status.INCONSISTENT) & block.feasible
        ),
    }


def _overflows(block: Within) -> Mask:
    """Do σ(v), within its bounds, or |C| of it leave the dtype, but for a margin?"""
    top = 1e-3 * float(np.finfo(block.dtype).max)
    start = np.abs(np.clip(block.law.sigma(block.v.astype(np.float64)), *block.ends))
    image = dot(np.abs(block.C.astype(np.float64)), np.minimum(start, top))
    return (start > top).any(1) | (image > top).any(1)


def _sizes(block: Within, answer: Answer) -> Array:
    """|C||z|; below the smallest normal number outputs count as that."""
    z = np.maximum(np.abs(answer.z), np.finfo(block.dtype).tiny)
    return dot(np.abs(block.C.astype(np.float64)), z)


def _check_sides(block: Within, answer: Answer) -> dict[str, Mask]:
    done, (lower, upper) = answer.are(Status.CONVERGED), block.sides
    r, tol = dot(block.C, answer.z), TOLERANCE[block.dtype]
    size = _sizes(block, answer)
    below = lower - r > tol * (np.abs(lower) + size)
    above = r - upper > tol * (np.abs(upper) + size)
    around = _FEW * block.eps * block.law.size  # of the ends of the range; bounds are kept exactly
    beyond = (answer.z < block.law.ends[0] - around) | (answer.z > block.law.ends[1] + around)
    if block.G is None:
        beyond = beyond | (answer.z < block.lower) | (answer.z > block.upper)
    ν = answer.multipliers
    equal = lower == upper
    off = (ν > 0) & (np.abs(r - lower) > tol * (np.abs(lower) + size))
    off |= (ν < 0) & ~equal & (np.abs(r - upper) > tol * (np.abs(upper) + size))
    none = ((ν > 0) & (lower == -np.inf)) | ((ν < 0) & (upper == np.inf))
    true = np.maximum(np.maximum(lower - r, r - upper), 0).max(1, initial=0)
    if block.G is None:
        excess = np.maximum(block.lower - answer.z, answer.z - block.upper)
        true = np.maximum(true, np.maximum(excess, 0).max(1))
    asked = [np.where(np.isfinite(x), np.abs(x), 0).max(1, initial=0) for x in (lower, upper)]
    slack = 1 + size.max(1, initial=0) + np.abs(answer.z).max(1) + asked[0] + asked[1]
    slack = 4 * block.eps * block.C.shape[2] * slack
    told = ~answer.are(Status.NONFINITE) & block.finite & ~(true > 1e-3 * np.finfo(block.dtype).max)
    return {
        "CONVERGED: every side is kept by the rule": done & (below | above).any(1),
        "CONVERGED: z keeps its bounds, exactly": done & beyond.any(1),
        "CONVERGED: a row with a multiplier is at its side": done & off.any(1),
        "CONVERGED: multipliers have the sign of a side that is there": done & none.any(1),
        "the residual reported is that of z": told & ~(np.abs(answer.residual - true) <= slack),
    }


def _check_point(block: Within, answer: Answer) -> dict[str, Mask]:
    done, held = answer.are(Status.CONVERGED), np.isinf(answer.u)
    C, law, eps, z = block.C, block.law, block.eps, answer.z.astype(np.longdouble)
    turned = np.swapaxes(C, 1, 2)
    v = block.v.astype(np.longdouble)
    u = np.where(held, answer.u, v + dot(turned, answer.multipliers))
    sums = (
        dot(np.abs(turned).astype(np.float64), np.abs(answer.multipliers)) + np.abs(v) + np.abs(u)
    )
    blur = np.where(held, 0, (_FEW + C.shape[1]) * eps * sums)  # of which z may use all again
    around = eps * (law.size + np.abs(z)) * _FEW
    low, high = law.sigma(u - blur) - around, law.sigma(u + blur) + around
    least, most = block.ends
    if block.G is None:
        low, high = np.clip(low, least, most) - around, np.clip(high, least, most) + around
    return {
        "CONVERGED: z = clip(σ(v + Aᵀλ + Gᵀν))": done & ~((z >= low) & (z <= high)).all(1),
        "CONVERGED: u = v + Aᵀλ + Gᵀν": done & ~(held | (np.abs(answer.u - u) <= blur)).all(1),
    }


def _check_active(block: Within, answer: Answer, active: Array) -> dict[str, Mask]:
    done = answer.are(Status.CONVERGED)
    if block.G is not None:
        wrong = active != np.sign(answer.multipliers[:, block.A.shape[1] :])
    else:
        wrong = ((active > 0) & (answer.z != block.lower)) | (
            (active < 0) & (answer.z != block.upper)
        )
    return {"CONVERGED: active says which sides hold": done & wrong.any(1)}


def _check_proofs(block: Within, answer: Answer, solution: taut.Solution) -> dict[str, Mask]:
    """Every certificate is proven once more, by `is_certificate`, as far as it is said to reach."""
    fails = np.zeros(len(block), bool)
    where = np.flatnonzero(answer.are(Status.INFEASIBLE))
    if len(where):
        radius, own = solution.radius[where], block.take(where)
        multipliers = torch.from_numpy(answer.multipliers[where])
        given = multipliers, own["A"], own["b"], block.law.activation
        sides = {k: own[k] for k in ("G", "lower", "upper")}
        # The sums of another batch may be rounded otherwise.
        proven = taut.is_certificate(*given, **sides, radius=radius.double() * (1 - 1e-12))
        least = _FAR if block.dtype is np.float64 else 1.0  # rounded to float32 it goes less far
        fails[where] = ~(proven & (radius >= least)).numpy()
    return {"INFEASIBLE: the multipliers are a certificate": fails}


def look_closely(block: Within, answer: Answer, solution: taut.Solution) -> tuple[list, Counter]:
    """Failures as (sample, check), and counts: exact proofs, linear programs, samples alone."""
    rng = np.random.default_rng([block.seed, block.number, 16])
    failures, counts = [], Counter()

    def some(mask: Mask, most: int) -> list[int]:
        return [int(i) for i in rng.permutation(np.flatnonzero(mask & block.finite))[:most]]

    infeasible = answer.are(Status.INFEASIBLE)
    radius = solution.radius.double().numpy()
    rows = some(infeasible, _EXACT) + some(infeasible & block.feasible, 50)
    for row in dict.fromkeys(rows):
        if exact_proof(block, answer.multipliers[row], row, radius[row]):
            where = ", sides rounded so" if block.feasible[row] else ""
            counts[f"exact proof of INFEASIBLE{where}"] += 1
        else:
            failures.append((row, "INFEASIBLE: the certificate holds in exact arithmetic"))
    for row in some(infeasible, _LINEAR):
        counts[f"HiGHS on INFEASIBLE: {linear_program(block, row)}"] += 1
    for row in some(answer.are(Status.MAX_ITERATIONS), _LINEAR):
        counts[f"HiGHS on MAX_ITERATIONS: {linear_program(block, row)}"] += 1
    if block.number % 5 == 0:
        failures += _alone(block, answer, some(block.finite, _ALONE))
    return failures, counts


def _alone(block: Within, answer: Answer, rows: list[int]) -> list[tuple[int, str]]:
    """A sample alone has its verdict, and its z to rounding."""
    failures = []
    digits = 1e-9 if block.dtype is np.float64 else 1e-4
    for row in rows:
        one = block.project(block.one(row))
        status, before = int(one.status[0]), int(answer.status[row])
        if Status.MAX_ITERATIONS in (status, before):
            continue
        z, there = one.z[0].numpy(), answer.z[row]
        rounded = {status, before} == {int(Status.CONVERGED), int(Status.INFEASIBLE)}
        if status != before and not (rounded and block.target[row] in (2, 3, 4)):
            failures.append((row, "a sample alone has the verdict it has in the batch"))
        elif status == before == 0:
            size = np.abs(there).max() + block.law.size
            if not (np.abs(z - there) <= digits * size).all():
                failures.append((row, "a sample alone has the z it has in the batch"))
    return failures


def exact_proof(block: Within, multipliers: Array, row: int, radius: float) -> bool:
    """Σ side ν > Σ sup{y_k z_k} in rational numbers; for |z| ≤ radius where z has no end."""
    lower, upper = (x[row] for x in block.sides)
    least, most = (x[row] for x in block.ends)
    if (lower > upper).any() or (least > most).any():
        return True
    matrix = block.matrix(row)
    return exact_claim(multipliers, matrix, (lower, upper), (least, most), float(radius))


def linear_program(block: Within, row: int) -> str:
    """How much room there is at most: interior, edge, or infeasible."""
    C, (lower, upper) = block.matrix(row).astype(np.float64), (x[row] for x in block.sides)
    K = C.shape[1]
    norms = np.linalg.norm(C, axis=1)
    norms = np.where(norms > 0, norms, 1)
    C, lower, upper = C / norms[:, None], lower / norms, upper / norms
    equal = lower == upper
    rows, right = [], []
    least, most = (x[row] for x in block.ends)
    for matrix, low, high in ((C[~equal], lower[~equal], upper[~equal]), (np.eye(K), least, most)):
        for line, x, y in zip(matrix, low, high, strict=True):
            if np.isfinite(x):
                rows.append([*-line, 1.0])
                right.append(-x)
            if np.isfinite(y):
                rows.append([*line, 1.0])
                right.append(y)
    return deepest(rows, right, C[equal], lower[equal], (None, 1.0))

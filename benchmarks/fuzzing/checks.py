"""What is checked on every sample, independently of taut's own arithmetic.

Residuals, predictors and outputs are recomputed in extended precision from the numbers taut was
given and the numbers it returned. A check is a mask over the samples, True where it fails.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

import taut
from fuzzing.blocks import Block
from fuzzing.laws import Law
from taut import Status

Array = NDArray[np.floating]
Mask = NDArray[np.bool_]

# The rule: |A z − b| allowed for a CONVERGED sample, relative to |b| + |A||z|, in each equation.
TOLERANCE = {np.float64: 1e-12, np.float32: 4 * 2.0**-23}
# Multiples of eps granted to taut for the rounding of one operation on numbers of known size.
_FEW = 32


@dataclass(frozen=True)
class Answer:
    """What taut returned for a block, as NumPy arrays."""

    z: Array
    multipliers: Array
    u: Array
    residual: Array
    iterations: NDArray[np.int64]
    status: NDArray[np.int64]

    @classmethod
    def of(cls, solution: taut.Solution) -> "Answer":
        names = ("z", "multipliers", "u", "residual", "iterations", "status")
        return cls(*(getattr(solution, name).detach().numpy() for name in names))

    def are(self, status: Status) -> Mask:
        return self.status == int(status)


def dot(A: Array, x: Array) -> Array:
    """A x equation by equation in extended precision; A is (n, I, K) or (1, I, K)."""
    wide = np.longdouble
    if len(A) == 1:  # one matrix product is faster than n
        return x.astype(wide) @ A[0].T.astype(wide)
    return np.matmul(A.astype(wide), x.astype(wide)[..., None])[..., 0]


def _largest(x: Array) -> Array:
    return x.max(1) if x.shape[1] else np.zeros(len(x))


def check_samples(block: Block, answer: Answer) -> dict[str, Mask]:
    """Every check that costs little, by name; samples where it fails are True."""
    with np.errstate(all="ignore"):
        return {
            **_check_damage(block, answer),
            **_check_converged(block, answer),
            **_check_residual(block, answer),
            **_check_infeasible(block, answer),
            **_check_inconsistent(block, answer),
        }


def _check_damage(block: Block, answer: Answer) -> dict[str, Mask]:
    """NONFINITE exactly where the input is not finite, or where its size must overflow."""
    named = answer.are(Status.NONFINITE)
    known = np.isin(answer.status, [int(s) for s in Status])
    decided = ~named & block.finite
    numbers = np.isfinite(answer.z).all(1) & np.isfinite(answer.multipliers).all(1)
    return {
        "a sample with NaN or inf is called NONFINITE": ~block.finite & ~named,
        "NONFINITE is said of finite input only where it overflows": (
            named & block.finite & ~overflows(block) & _fits(block, answer)
        ),
        "the status is one of the five": ~known,
        "z and multipliers are finite unless NONFINITE": decided & ~numbers,
    }


def _fits(block: Block, answer: Answer) -> Mask:
    """z and |A||z| as returned are numbers of the dtype."""
    z = np.abs(answer.z.astype(np.float64))
    top = float(np.finfo(block.dtype).max)
    return (z <= top).all(1) & (dot(np.abs(block.A.astype(np.float64)), z) <= top).all(1)


def overflows(block: Block) -> Mask:
    """Finite input so large that the first evaluation of σ(v) or A z leaves the dtype."""
    top = float(np.finfo(block.dtype).max)
    v, A = block.v.astype(np.float64), np.abs(block.A.astype(np.float64))
    start = np.abs(block.law.sigma(v))
    image = dot(A, np.minimum(start, top))
    return (start > 1e-3 * top).any(1) | (image > 1e-3 * top).any(1)


def _check_converged(block: Block, answer: Answer) -> dict[str, Mask]:
    done, held = answer.are(Status.CONVERGED), np.isinf(answer.u)
    A, law, eps = block.A, block.law, block.eps
    absolute = np.abs(A.astype(np.float64))
    z, v = (x.astype(np.longdouble) for x in (answer.z, block.v))
    pull = dot(np.swapaxes(A, 1, 2), answer.multipliers)
    u = np.where(held, answer.u, v + pull)  # at an end of the range, u is ±inf and z the end
    # What u = v + Aᵀλ loses when it is computed in the dtype.
    sums = dot(np.swapaxes(absolute, 1, 2), np.abs(answer.multipliers)) + np.abs(v) + np.abs(u)
    blur = np.where(held, 0, (_FEW + A.shape[1]) * eps * sums)
    around = eps * (law.size + np.abs(z)) * _FEW
    low, high = law.sigma(u - blur) - around, law.sigma(u + blur) + around
    lower, upper = law.ends
    inside = ((z >= lower - around) & (z <= upper + around)).all(1)
    return {
        "CONVERGED: A z = b": done & breaks_the_rule(block, answer.z),
        "CONVERGED: z = σ(v + Aᵀλ)": done & ~((z >= low) & (z <= high)).all(1),
        "CONVERGED: z is in the range": done & ~inside,
        "CONVERGED: u = v + Aᵀλ": done & ~(held | (np.abs(answer.u - u) <= blur)).all(1),
        "CONVERGED: an output held is at its end": done & ~_at_their_ends(law, answer, held),
    }


def breaks_the_rule(block: Block, z: Array) -> Mask:
    """Where |A z − b| is more than the rule allows."""
    b, dtype = block.b.astype(np.longdouble), block.dtype
    excess = np.abs(dot(block.A, z) - b)
    # Below the smallest normal number, numbers have fewer digits: outputs there count as that.
    size = np.maximum(np.abs(z), np.finfo(dtype).tiny)
    allowed = TOLERANCE[dtype] * (np.abs(b) + dot(np.abs(block.A.astype(np.float64)), size))
    # What float64 cannot tell from 0 is 0.
    return ~(excess <= allowed + 2.0**-1074).all(1)


def _at_their_ends(law: Law, answer: Answer, held: Mask) -> Mask:
    end = np.where(answer.u > 0, *reversed(law.ends))
    slack = 4 * np.finfo(answer.z.dtype).eps * law.size
    return (~held | (np.abs(answer.z - end) <= slack)).all(1)


def _check_residual(block: Block, answer: Answer) -> dict[str, Mask]:
    told = ~answer.are(Status.NONFINITE) & block.finite
    true = _largest(np.abs(dot(block.A, answer.z) - block.b))
    size = np.abs(block.b) + dot(np.abs(block.A), np.abs(answer.z))
    terms = max(1, block.A.shape[2])
    tiny = float(np.finfo(block.dtype).tiny)
    slack = 2 * block.eps * terms * _largest(size) + terms * tiny
    return {"the residual reported is that of z": told & ~(np.abs(answer.residual - true) <= slack)}


def _check_infeasible(block: Block, answer: Answer) -> dict[str, Mask]:
    fails = np.zeros(len(block), bool)
    where = np.flatnonzero(answer.are(Status.INFEASIBLE))
    if len(where):
        A = block.A[0] if block.shared else block.A[where if len(block.A) > 1 else [0]]
        proven = taut.is_certificate(
            torch.from_numpy(answer.multipliers[where]),
            torch.from_numpy(A),
            torch.from_numpy(block.b[where]),
            block.law.activation,
        )
        fails[where] = ~proven.numpy()
    return {"INFEASIBLE: the multipliers are a certificate": fails}


def _check_inconsistent(block: Block, answer: Answer) -> dict[str, Mask]:
    said = answer.are(Status.INCONSISTENT)
    fails = np.zeros(len(block), bool)
    where = np.flatnonzero(said & block.finite)
    if len(where):
        distance, noise = _outside(block, where)
        fails[where] = distance <= noise
    return {
        "INCONSISTENT: b is not in the range of A": fails,
        "INCONSISTENT is not said of b = A z": said & block.feasible,
    }


def _outside(block: Block, where: NDArray[np.int64]) -> tuple[Array, Array]:
    """Distance of b from the range of A with unit rows, and what of it rounding explains."""
    A = (block.A if len(block.A) == 1 else block.A[where]).astype(np.float64)
    norms = np.linalg.norm(A, axis=2, keepdims=True)
    norms = np.where(norms > 0, norms, 1)
    left, values, _ = np.linalg.svd(A / norms, full_matrices=False)
    live = values > 8 * block.eps * max(A.shape[1:]) * values[:, :1]
    left = left * live[:, None, :]
    b = block.b[where].astype(np.float64) / norms[..., 0]
    inner = np.matmul(left, np.matmul(np.swapaxes(left, 1, 2), b[..., None]))[..., 0]
    return np.abs(b - inner).max(1), 4 * block.eps * np.abs(b).max(1)

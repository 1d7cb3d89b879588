"""Infinite v, in equations, inequalities and bounds: what converges beside them is right.

An infinite v holds its output at the end that it points to, of the range or of the bounds on z.
"""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import taut
from fuzzing.blocks import Block, product
from fuzzing.checks import Answer, check_samples
from fuzzing.optimal import check_optimal
from fuzzing.within import Within

_MOST = 64  # samples
_FEW = 20  # equations
_SHARE = 0.15  # of the outputs, at each end
Mask = NDArray[np.bool_]


def check_held(block: Block | Within) -> list[tuple[int, str]]:
    """The samples that fail, with the check that they fail."""
    n = min(_MOST, len(block))
    if not n or not np.isfinite(block.A).all():
        return []
    held, low, high = _held(block, n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (taut.ConditionWarning, taut.FailureWarning))
        given = held.tensors()
        v = given["v"] = given["v"].requires_grad_()
        solution = held.project(given)
        answer = Answer.of(solution)
        found = check_optimal(held, answer, solution) if isinstance(held, Within) else (
            check_samples(held, answer))  # fmt: skip
        (slope,) = torch.autograd.grad((solution.z * _seed(held, n)).sum(), v)
    found = {name: mask for name, mask in found.items() if name.startswith("CONVERGED")}
    done, out = answer.status == 0, low | high
    least, most = _ends(held)
    end = np.where(low, least, most)
    found["an infinite v holds its output at the end"] = done & (out & (answer.z != end)).any(1)
    infinite = np.isinf(answer.u) & (np.sign(answer.u) == np.sign(held.v))
    found["u is infinite where v is"] = done & (out & ~infinite).any(1)
    found["a held output has no gradient"] = (out & (slope.numpy() != 0)).any(1)
    return [(int(row), name) for name, mask in found.items() for row in np.flatnonzero(mask)]


def _seed(block: Block | Within, n: int) -> torch.Tensor:
    rng = np.random.default_rng([block.seed, block.number, 22])
    return torch.from_numpy(rng.normal(size=(n, block.v.shape[1])).astype(block.dtype))


def _ends(block: Block | Within) -> tuple[Any, Any]:
    if isinstance(block, Within):
        return tuple(x.astype(block.dtype) for x in block.ends)
    return tuple(np.broadcast_to(x.astype(block.dtype), block.v.shape) for x in block.law.ends)


def _held(block: Block | Within, n: int) -> tuple[Any, Mask, Mask]:
    """Some samples with infinite v, and sides that leave their held z where it is."""
    fields = ["v", "b", "truth", "target", "start", "logits"]
    fields += ["lower", "upper"] if isinstance(block, Within) else []
    part: Any = {name: getattr(block, name)[:n] for name in fields}
    for name in ("A", "G"):
        x = getattr(block, name, None)
        if x is not None:
            part[name] = x if len(x) == 1 else x[:n]
    few: Any = replace(block, init=None, **part)
    rng = np.random.default_rng([block.seed, block.number, 21])
    least, most = _ends(few)
    draw = rng.random(few.v.shape)
    sane = (least <= most) & np.isfinite(few.v).all(1, keepdims=True)
    # Of many equations beside hardly more free outputs, rounding decides.
    I, K = few.A.shape[1:]
    rank = np.minimum(draw, 1 - draw).argsort(1).argsort(1)
    sane &= rank < (K if I <= _FEW else K - 1.25 * I)
    low = (draw < _SHARE) & np.isfinite(least) & sane
    high = (draw > 1 - _SHARE) & np.isfinite(most) & sane
    v = np.where(low, -np.inf, np.where(high, np.inf, few.v)).astype(block.dtype)
    truth = np.where(low, least, np.where(high, most, few.truth))
    if isinstance(block, Within) and block.G is None:
        truth = np.clip(truth, least, most)
    whole = np.isfinite(few.b).all(1, keepdims=True)
    more = {"b": np.where(whole, product(few.A, truth).astype(block.dtype), few.b)}
    if isinstance(block, Within) and block.G is not None:
        r = product(few.G, truth)
        lower, upper = np.minimum(few.lower, r), np.maximum(few.upper, r)
        more |= {"lower": lower.astype(block.dtype), "upper": upper.astype(block.dtype)}
    return replace(few, v=v, truth=truth, **more), low, high

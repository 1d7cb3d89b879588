"""The other ways in: half precision, autocast, infinite v, predictions, targets, later writes.

Each takes a few samples of a block and must give what the front door gives, or what it promises.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import taut
from fuzzing.blocks import Block
from fuzzing.checks import breaks_the_rule
from fuzzing.proofs import exact_proof

_MOST = 32  # samples
_SAID = ("z", "multipliers", "u", "residual", "status", "active", "radius", "condition")
Failures = Iterator[tuple[int, str]]


def check_doors(block: Block) -> list[tuple[int, str]]:
    """The samples that fail, with the check that they fail."""
    few = _few(block)
    if not len(few) or not few.A.shape[1]:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (taut.ConditionWarning, taut.FailureWarning))
        found = [*_half(few), *_autocast(few), *_held(few), *_predictions(few), *_targets(few)]
        return [*found, *_recorded(few), *_prepared(few)]


def _few(block: Block) -> Block:
    part = {name: getattr(block, name)[:_MOST] for name in ("v", "b", "truth")}
    part |= {name: getattr(block, name)[:_MOST] for name in ("target", "start", "logits")}
    A = block.A if len(block.A) == 1 else block.A[:_MOST]
    return replace(block, A=A, init=None, **part)


def _differ(one: taut.Solution, other: taut.Solution) -> Tensor:
    """Samples whose answers are not the same, bit for bit."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("z", "residual", "status")]
    same = [(x == y) | (x.isnan() & y.isnan()) for x, y in pairs]
    return ~(same[0].all(-1) & same[1] & same[2])


def _named(which: Tensor, check: str) -> Failures:
    return ((int(row), check) for row in which.nonzero().squeeze(-1))


def _half(block: Block) -> Failures:
    """A half-precision v is that number in float32."""
    given = block.tensors()
    if given["v"].dtype != torch.float32:
        return
    for dtype in (torch.float16, torch.bfloat16):
        v = given["v"].to(dtype)
        half, full = (block.project({**given, "v": x}) for x in (v, v.float()))
        yield from _named(_differ(half, full), f"a {dtype} v gives what it gives in float32")


def _autocast(block: Block) -> Failures:
    plain = block.solve()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = block.solve()
    yield from _named(_differ(plain, cast), "autocast does not reach inside")


def _held(block: Block) -> Failures:
    """Outputs whose v is infinite are at their ends exactly, and the rule holds beside them."""
    given = block.tensors()
    rng = np.random.default_rng([block.seed, block.number, 1])
    lower, upper = block.law.activation.range.bounds(given["v"])
    side = torch.from_numpy(rng.random(given["v"].shape))
    low, high = (side < 0.1) & lower.isfinite(), (side > 0.9) & upper.isfinite()
    v = given["v"].masked_fill(low, -torch.inf).masked_fill(high, torch.inf)
    solution = block.project({**given, "v": v})
    ok = solution.converged
    z = torch.where(low, lower, torch.where(high, upper, solution.z))
    yield from _named(ok & (z != solution.z).any(-1), "an infinite v holds its output at the end")
    yield from _named(ok & _broken(block, solution.z), "A z = b by the rule beside held outputs")
    b = (given["A"].double() @ z.double().unsqueeze(-1)).squeeze(-1).to(v.dtype)
    again = block.project({**given, "v": v, "b": b})  # feasible, as z shows
    # Its b was rounded, and may have left what can be reached by that: a proof excuses it.
    for row in (ok & (again.status == taut.Status.INFEASIBLE)).nonzero().flatten().tolist():
        least, most = (np.where((low | high)[row], z[row], x) for x in block.law.ends)
        multipliers = again.multipliers[row].numpy()
        if not exact_proof(multipliers, block.matrix(row), b[row].numpy(), least, most):
            yield row, "no sample with held outputs and a solution is called infeasible"


def _broken(block: Block, z: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(breaks_the_rule(block, z.numpy()))


def _predictions(block: Block) -> Failures:
    """`reconcile` of a y that agrees already gives it back; at the ends exactly."""
    given = block.tensors()
    y = torch.from_numpy(block.truth.astype(block.dtype))
    lower, upper = block.law.activation.range.bounds(y)
    y = y.clamp(lower, upper)
    activation = block.law.activation
    solution = taut.reconcile(y, given["A"], given["b"], activation=activation, on_failure="return")
    ok, ends = solution.converged, (y == lower) | (y == upper)
    moved = (ends & (solution.z != y)).any(-1)
    yield from _named(ok & moved, "reconcile leaves outputs at an end there")
    yield from _named(ok & _broken(block, solution.z), "A z = b by the rule after reconcile")


def _targets(block: Block) -> Failures:
    """The loss of targets in the closed range is a number ≥ 0 up to rounding; beyond it raises."""
    solution = block.solve()
    y = torch.from_numpy(block.truth.astype(block.dtype))
    lower, upper = block.law.activation.range.bounds(y)
    y = y.clamp(lower, upper).nan_to_num()
    large = (solution.z.abs() > 1e15).any(-1) | (y.abs() > 1e15).any(-1)
    loss = taut.matched_loss(solution, y, reduction="none")
    yield from _named(loss.isnan() & ~large, "the loss of a target in the range is a number")
    failed = solution.status > taut.Status.MAX_ITERATIONS
    yield from _named(failed & (loss != 0), "a sample that fails adds nothing to the loss")
    beyond = torch.where(lower.isfinite(), lower - 1 - lower.abs(), upper + 1 + upper.abs())
    if not bool(beyond.isfinite().all()) or not bool((solution.converged & ~large).any()):
        return
    row = int((solution.converged & ~large).nonzero()[0])
    y[row] = beyond
    try:
        taut.matched_loss(solution, y)
    except ValueError:
        return
    yield row, "a target outside the range raises"


def _recorded(block: Block) -> Failures:
    """What a solution says is fixed, whatever is written to its inputs afterwards."""
    given = block.tensors()
    if block.number % 2:
        given["lower"] = torch.from_numpy(block.truth.astype(block.dtype)) - 0.5
    right = block.project({name: None if x is None else x.clone() for name, x in given.items()})
    solution = block.project(given)
    for x in given.values():
        if x is not None:
            x.numpy().fill(np.nan)
    for name in _SAID:
        found, said = getattr(solution, name), getattr(right, name)
        differ = (found != said) & ~(found.isnan() & said.isnan())
        differ = differ.reshape(len(block), -1).any(-1)
        yield from _named(differ, f"later writes to the inputs do not change {name}")


def _prepared(block: Block) -> Failures:
    """A write to A does not reach what was prepared of it."""
    given = block.tensors()
    prepared = taut.prepare(given["A"], block.law.activation)
    before = block.project({**given, "A": prepared})
    given["A"].numpy().fill(np.nan)
    after = block.project({**given, "A": prepared})
    yield from _named(_differ(before, after), "a write to A does not reach what was prepared")

"""Neighbours, positions and gradients: what one row may not do to another.

A block is solved again with one row ruined. Every bit of the other rows' z, multipliers and
gradients must be what it was. A few rows are solved alone, and must come out the same.
"""

import numpy as np
import torch
from torch import Tensor

from fuzzing.blocks import Block
from taut import Status

_LARGEST = 400_000  # entries of A (or of the batch) up to which a block is solved again
_DIGITS = {torch.float64: 1e-13, torch.float32: 1e-5}


def check_bits(block: Block) -> list[tuple[int, str]]:
    """Failures as (row, check)."""
    if block.A.size + block.v.size > _LARGEST:
        return []
    rng = np.random.default_rng([block.seed, block.number, 2])
    weights = torch.from_numpy(rng.normal(size=block.v.shape).astype(block.dtype))
    before = _differentiate(block, block.tensors(), weights)
    failures = _gradients(before)
    victim = int(rng.integers(len(block)))
    for name, ruined in _ruins(block, victim):
        after = _differentiate(block, ruined, weights)
        for what in ("z", "multipliers", "status", "∂v", "∂b", "∂A"):
            if what in before and what in after:
                changed = _differs(before[what], after[what])
                changed[victim] = False
                text = f"{what} of a row is the same bits when a neighbour has {name}"
                failures += [(int(r), text) for r in changed.nonzero().flatten()[:3]]
    return failures + _alone(block, before, rng)


def _ruins(block: Block, victim: int) -> list[tuple[str, dict[str, Tensor | None]]]:
    """The block with one row spoilt, in several ways."""
    ways = [("NaN in v", "v", float("nan"))]
    if block.A.shape[1]:
        ways += [("inf in b", "b", float("inf")), ("a b out of reach", "b", 1e6)]
        if not block.shared:
            ways += [("NaN in A", "A", float("nan")), ("an A of zeros", "A", 0.0)]
    ruins = []
    for name, place, value in ways:
        tensors = block.tensors()
        tensors[place][victim] = value
        ruins.append((name, tensors))
    return ruins


def _differentiate(block: Block, tensors: dict, weights: Tensor) -> dict[str, Tensor]:
    leaves = [k for k in ("v", "b", "A") if k != "A" or not block.shared]
    for k in leaves:
        tensors[k].requires_grad_()
    solution = block.project(tensors)
    usable = solution.converged.unsqueeze(-1)
    loss = torch.where(usable, solution.z * weights, torch.zeros_like(weights)).sum()
    gradients = torch.autograd.grad(loss, [tensors[k] for k in leaves], allow_unused=True)
    result = {"z": solution.z, "multipliers": solution.multipliers, "status": solution.status}
    result |= {f"∂{k}": g for k, g in zip(leaves, gradients, strict=True) if g is not None}
    return {k: x.detach() for k, x in result.items()}


def _gradients(result: dict[str, Tensor]) -> list[tuple[int, str]]:
    failures = []
    failed = result["status"] != int(Status.CONVERGED)
    # Where z is astronomical its derivatives, products of several such numbers, may overflow.
    huge = result["z"].abs().amax(-1) > 1e15
    for what in ("∂v", "∂b", "∂A"):
        if what in result:
            flat = result[what].flatten(1)
            wild = ~flat.isfinite().all(1) & ~huge
            rows = wild.nonzero().flatten()[:3]
            failures += [(int(r), f"{what} is finite") for r in rows]
            rows = (failed & (flat != 0).any(1) & ~wild).nonzero().flatten()[:3]
            failures += [(int(r), f"{what} of a failed row is zero") for r in rows]
    return failures


def _differs(x: Tensor, y: Tensor) -> Tensor:
    """Rows of which a bit differs; NaN equals NaN."""
    same = (x == y) | (x.isnan() & y.isnan())
    return ~same.reshape(len(x), -1).all(1)


def _alone(block: Block, batch: dict[str, Tensor], rng: np.random.Generator) -> list:
    """A row alone is the row in its batch: same verdict, same z to rounding."""
    failures = []
    for row in rng.permutation(len(block))[:4]:
        row = int(row)
        single = block.project(block.one(row))
        text = "a row alone has the verdict it has in the batch"
        if int(single.status) != int(batch["status"][row]):
            failures.append((row, text))
        elif int(single.status) == int(Status.CONVERGED):
            z = batch["z"][row]
            # Rounding of u = v + Aᵀλ, which the rows of A then amplify.
            size = (1 + z.abs().max()) * (
                1 + single.u.abs().max() + float(np.abs(block.v[row]).max())
            )
            size = size * single.condition.nan_to_num(nan=1.0).clamp(min=1)
            if not ((single.z - z).abs() <= _DIGITS[z.dtype] * size).all():
                failures.append((row, "a row alone has the z it has in the batch"))
    return failures

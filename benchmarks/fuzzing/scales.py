"""Scale: where σ is a line, a block times a power of two has the verdicts that it has.

Powers of two, as then no number of the block loses a digit: a sample whose verdict hangs on the
last one has it again.
"""

import numpy as np
import torch

from fuzzing.blocks import Block
from fuzzing.within import Within
from taut import Solution

_FAR = 40.0  # of two: about 10¹²
_ROOM = 1e-3  # of the range of a dtype, which no number leaves


def check_scales(block: Block | Within, solution: Solution) -> list[tuple[int, str]]:
    """Failures as (row, check)."""
    if not block.law.straight:
        return []
    rng = np.random.default_rng([block.seed, block.number, 29])
    power = int(np.rint(rng.uniform(-_FAR, _FAR)))
    given = block.tensors()
    sides = [name for name in ("v", "b", "lower", "upper", "init") if given.get(name) is not None]
    far = {name: torch.ldexp(given[name], torch.tensor(power)).to(given[name]) for name in sides}
    again = block.project({**given, **far})
    fits = torch.ones(len(block), dtype=torch.bool)
    for name in sides:
        fits &= _fits(given[name], far[name])
    for z in (solution.z, again.z, solution.multipliers, again.multipliers):
        fits &= (z.detach().abs() < _ROOM * torch.finfo(z.dtype).max).all(-1)
    changed = fits & (solution.status != again.status)
    text = "v, b and sides times a power of two have the same verdict"
    return [(int(row), text) for row in changed.nonzero().flatten()[:3]]


def _fits(x: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
    """Has every number kept its digits? What is not finite, or 0, has none."""
    limits, plain = torch.finfo(x.dtype), x.isfinite() & (x != 0)
    inside = (far.abs() > limits.tiny / limits.eps**2) & (far.abs() < _ROOM * limits.max)
    return (~plain | inside).all(-1)

"""Newton's method on the equations of a solution, for samples whose corrections contract.

    u = v + J(z)ᵀλ,  c(z) = 0,  z = σ(u)

Each factorisation serves two steps. A sample that does not contract is handed on: this lane is
speed alone.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.solvers.curve import REACH, Attempt, Curve, worst
from taut.systems.saddle import Saddle, back, is_minimum, length

ROUNDS = 14
_ACCURATE = 1e-12  # predicted error of z, in the local metric and its `sizes`, that is enough
_LONGER, _SHORT = 2.0, 1e-7  # a correction may be so much longer than the last one, or so short
_CHORD = 0.5  # a second step with the same factor must be shorter by this
_FALLS = 0.3  # |c| that is still larger than this part of what it was no longer falls


@final
class _Round(NamedTuple):
    """One sample after a round."""

    u: Float[Tensor, "n K"]
    multipliers: Float[Tensor, "n rows"]
    size: Float[Tensor, "n"]  # of the last correction, in the local metric over `sizes`
    error: Float[Tensor, "n"]  # as predicted from the corrections
    good: Tensor  # does it contract?
    sizes: Float[Tensor, "n K"]


def contract(curve: Curve, u: Tensor, multipliers: Tensor, rounds: int) -> Attempt:
    """Where each sample ends, and which are done: feasible to rounding, a strict minimum."""
    found = Attempt.start(u, multipliers)
    place = torch.arange(len(u), device=u.device)
    size = u.new_full((len(u),), torch.inf)
    flat = not bool(curve.own(multipliers).any())  # no multipliers on h yet: S = 0
    for count in range(1, min(rounds, ROUNDS) + 1):
        z = curve.sigma(u)
        patch, w = curve.surface.at(z), curve.slope(u)
        c, J, r = patch.c, patch.jacobian(), w.sqrt()
        S = None if flat else curve.curvature(patch, multipliers)
        saddle = Saddle.of(J, r, S)
        now = _stepped(curve, saddle, (c, J, r), u, multipliers, size)
        if not flat:
            now = _chord(curve, saddle, (J, r), now)
        flat, u, multipliers, size = False, now.u, now.multipliers, now.size
        if bool((now.error > _ACCURATE).all()) and bool(now.good.all()):
            continue
        z = curve.sigma(u)
        scales, before = curve.scales(J, z, w, u, multipliers, now.sizes), c
        c = curve.surface.value(z)
        off = worst(c, scales.cap)
        stopped = off > _FALLS * worst(before, scales.cap)
        settled = (worst(c, scales.full) <= curve.target) | stopped
        done = now.good & (now.error <= _ACCURATE) & (off <= curve.floor) & settled
        index = done.nonzero().squeeze(-1)
        if len(index):
            # A saddle found fast is no answer.
            strict = is_minimum(J, r, S)[index]
            steps = torch.full_like(index, count)
            found.write(place[index], u[index], multipliers[index], strict, steps, off[index])
        left = (now.good & ~done).nonzero().squeeze(-1)
        if len(left) == 0:
            break
        if len(left) < len(place):
            curve, place = curve.take(left), place[left]
            u, multipliers, size = u[left], multipliers[left], size[left]
    return found


def _stepped(
    curve: Curve,
    saddle: Saddle,
    local: tuple[Any, ...],
    u: Tensor,
    multipliers: Tensor,
    size: Tensor,
) -> _Round:
    """One step: H y − J̃ᵀdλ = r∘(v − u + Jᵀλ), J̃ y = −c, and u = v + Jᵀλ + S(r∘y) after it."""
    c, J, r = local
    y, dλ, bent = saddle.solve(r * (curve.v - u + back(J, multipliers)), -c)
    after = multipliers + dλ
    moved = curve.v + back(J, after)
    moved = moved if bent is None else moved + bent
    sizes = curve.sizes(torch.maximum(u.abs(), moved.abs()), r)
    now = length(y / sizes)
    good = saddle.fine & (curve.steps(moved - u) <= REACH)
    good = good & ((now <= _LONGER * size) | (now <= _SHORT))
    # Corrections that shrink by θ leave θ² of the last one; the first says nothing of that.
    error = torch.where(size.isinf(), now, (now / size).clamp(max=1).square() * now)
    use = good.unsqueeze(-1)
    u, multipliers = torch.where(use, moved, u), torch.where(use, after, multipliers)
    return _Round(u, multipliers, now, error, good, sizes)


def _chord(curve: Curve, saddle: Saddle, local: tuple[Any, ...], now: _Round) -> _Round:
    """A second step with the same factor: it needs c and Jᵀλ at the new z, no J."""
    J, r = local
    u, multipliers, size, error, good, sizes = now
    light = curve.surface.at(curve.sigma(u))
    off = curve.v - u + light.pull(multipliers)
    y, dλ, bent = saddle.solve(r * off, -light.c)
    own = length(y / sizes)
    use = good & (own <= _CHORD * size)
    moved = u + off + back(J, dλ)
    moved = moved if bent is None else moved + bent
    which = use.unsqueeze(-1)
    return _Round(
        torch.where(which, moved, u),
        torch.where(which, multipliers + dλ, multipliers),
        torch.where(use, own, size),
        torch.where(use, 2 * own * own / size.clamp_min(1e-300), error),
        good,
        sizes,
    )

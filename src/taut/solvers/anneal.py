"""Large logits are a low temperature: solve for t·v with t rising to 1.

Where σ has saturated at once in most outputs Newton's steps crawl. Solved loosely for a small t
first, and with λ carried along as t rises, they do not.

Where an exp is far too high, and all equations are anchored in outputs whose σ does not bend, b
rises with v: exp is then nearly a wall, and λ nearly a multiple of t.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.solvers.step import Search, State, newton_step

_FIRST = 2.0  # the largest |t·v| to begin with
_RISE = 3.0  # of t from stage to stage
_LOOSE = 1e-2  # the level of the residual that ends a stage
_STEPS, _GROWN = 60, 200  # at most; where b rises too


def anneal(search: Search, state: State) -> tuple[State, Bool[Tensor, "n"]]:
    """The states where t has reached 1, and which have; the others are as they were."""
    search = search._replace(target=_LOOSE)
    t = (_FIRST / search.task.v.abs().amax(-1)).clamp(max=1)
    place = torch.arange(len(t), device=t.device)
    result, done = state.take(place), torch.zeros_like(place, dtype=torch.bool)
    at = _warm(search, t).state(torch.zeros_like(state.multipliers))
    for _ in range(_STEPS):
        ready = at.relative <= _LOOSE
        ended = (ready & (t == 1)).nonzero().squeeze(-1)
        if len(ended):
            result.write(place[ended], at.take(ended))
            done[place[ended]] = True
            left = (~(ready & (t == 1))).nonzero().squeeze(-1)
            if len(left) == 0:
                break
            search, at, t, place, ready = (
                search.take(left), at.take(left), t[left], place[left], ready[left]
            )  # fmt: skip
        higher = torch.where(ready, (_RISE * t).clamp(max=1), t)
        warm = _warm(search, higher)
        if bool(ready.any()):
            at = warm.state(at.multipliers * (higher / t).unsqueeze(-1))
        at, t = newton_step(warm, at, None), higher
    return result, done


def _warm(search: Search, t: Float[Tensor, "n"]) -> Search:
    """The samples with t·v instead of v."""
    return search._replace(task=replace(search.task, v=t.unsqueeze(-1) * search.task.v))


def grown(search: Search, state: State) -> State:
    """The states where t·v and t·b have grown to v and b, where that leads nearer to b."""
    task, search = search.task, search._replace(target=_LOOSE)
    rows = task.A.abs().apply(torch.ones_like(task.v))
    size = torch.maximum(task.v.abs().amax(-1), (task.b.abs() / rows).nan_to_num(0.0, 0.0).amax(-1))
    t = (_FIRST / size).clamp(max=1)
    at = _small(search, t).state(torch.zeros_like(state.multipliers))
    for _ in range(_GROWN):
        ready = at.relative <= _LOOSE
        if bool((ready & (t == 1)).all()):
            break
        higher = torch.where(ready, (_RISE * t).clamp(max=1), t)
        # Along the path: A diag(w)(v + Aᵀλ̇) = b.
        w = task.activation.slope(at.u)
        along = search.direction(w, task.A.apply(w * task.v) - task.b)
        multipliers = at.multipliers + (higher - t).unsqueeze(-1) * along
        here = _small(search, higher)
        at, t = newton_step(here, here.state(multipliers), None), higher
    better = ((t == 1) & (at.relative < state.relative.nan_to_num(torch.inf))).unsqueeze(-1)
    pairs = zip(at, state, strict=True)
    return State(*(torch.where(better if x.ndim > 1 else better[:, 0], x, y) for x, y in pairs))


def _small(search: Search, t: Float[Tensor, "n"]) -> Search:
    """The samples with t·v and t·b."""
    part = t.unsqueeze(-1)
    task = replace(search.task, v=part * search.task.v, b=part * search.task.b)
    return search._replace(task=task, size_of_b=part * search.size_of_b)

"""Outputs held at an end of their range, because a row leaves them no other place.

Σ a_k z_k reaches its least and its most at ends of the ranges only. An equation whose b lies there
fixes all of its outputs, and so does an inequality that asks for no more than the least; with these
fixed, others may be fixed too. The ends are exact: z is the end, u = ±inf there, and the slope 0.
"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.activations import Activation
from taut.maps import LinearMap


def slack(eps: float) -> float:
    """How far a b given to `eps` may be from an end that it is meant to be at, over the size of
    the terms: its rounding, and that of the sums here.
    """
    return eps + 4 * 2.0**-52


@final
class Reach(NamedTuple):
    """The least and the most that each equation can come to, and the size of those sums' terms.

    Infinite where a term is, and where there is none.
    """

    least: Float[Tensor, "*n I"]
    most: Float[Tensor, "*n I"]
    least_terms: Float[Tensor, "*n I"]
    most_terms: Float[Tensor, "*n I"]

    def at_least(self, b: Float[Tensor, "n I"], eps: float) -> Bool[Tensor, "n I"]:
        """Where b, given to `eps`, is the least there can be; NaN is not."""
        return (b - self.least).abs() <= slack(eps) * self.least_terms

    def at_most(self, b: Float[Tensor, "n I"], eps: float) -> Bool[Tensor, "n I"]:
        """Where b, given to `eps`, is the most there can be."""
        return (b - self.most).abs() <= slack(eps) * self.most_terms


def reach(A: LinearMap, lower: Float[Tensor, "*n K"], upper: Float[Tensor, "*n K"]) -> Reach:
    """What the equations reach with outputs between `lower` and `upper`.

    >>> from taut.maps import as_map
    >>> A = as_map(torch.tensor([[1.0, -1.0]]))
    >>> reach(A, torch.tensor([0.0, 0.0]), torch.tensor([1.0, torch.inf]))[:2]
    (tensor([-inf]), tensor([1.]))
    """
    positive, negative = A.over(A.data.clamp_min(0)), A.over(A.data.neg().clamp_min(0))
    most, most_terms = _most(positive, negative, lower, upper)
    least, least_terms = _most(negative, positive, lower, upper)
    return Reach(-least, most, least_terms, most_terms)


def _most(up: LinearMap, down: LinearMap, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The most that (up − down) z comes to, and the size of its terms."""
    low, high = lower.where(lower.isfinite(), 0), upper.where(upper.isfinite(), 0)
    total, terms = up.apply(high) - down.apply(low), up.apply(high.abs()) + down.apply(low.abs())
    endless = _any(up, up.data > 0, upper.isinf()) | _any(down, down.data > 0, lower.isinf())
    some = _any(up, (up.data > 0) | (down.data > 0), torch.ones_like(lower, dtype=torch.bool))
    return total.masked_fill(endless | ~some, torch.inf), terms


def _any(A: LinearMap, entries: Bool[Tensor, "..."], outputs: Bool[Tensor, "*n K"]) -> Tensor:
    """For each equation: is there an output of `outputs` with an entry of `entries`?"""
    dtype = A.data.dtype
    return A.over(entries.to(dtype)).apply(outputs.to(dtype)) > 0


@final
class Held(NamedTuple):
    """Samples with outputs at an end."""

    index: Int[Tensor, "n"]  # in the batch
    which: Bool[Tensor, "n K"]
    end: Float[Tensor, "n K"]  # z there
    given: Bool[Tensor, "n"]  # some of them by v = ±inf, not by an equation

    def take(self, index: Tensor) -> "Held":
        return Held(*(x[index] for x in self))


def held(
    A: LinearMap,
    v: Float[Tensor, "n K"],
    asked: tuple[Float[Tensor, "n I"], Float[Tensor, "n I"]],
    activation: Activation,
    known: Reach | None,
    eps: float,
    bounds: tuple[Float[Tensor, "n K"], ...] = (),
) -> Held | None:
    """The samples with outputs that are held; None where there are none.

    Everything is in float64; v and the sides `asked` for, which are both b for an equation, were
    given to `eps`; `known` is what the rows of A reach, None where σ has no ends. An infinite v
    holds its output at the end that it points to: of the range, or of the `bounds` on z.
    """
    suspect = v.isinf().any(-1)
    if known is not None:  # else no row holds any
        at_end = known.at_least(asked[1], eps) | known.at_most(asked[0], eps)
        suspect = suspect | at_end.any(-1)
    if not bool(suspect.any()):
        return None
    index = suspect.nonzero().squeeze(-1)
    v, A, asked = v[index], A.take(index), (asked[0][index], asked[1][index])
    lower, upper = (x.expand(v.shape) for x in activation.range.bounds(v))
    floor, ceiling = lower, upper
    if bounds:
        floor = torch.maximum(lower, bounds[0][index])
        ceiling = torch.minimum(upper, bounds[1][index])
    low, high = (v == -torch.inf) & floor.isfinite(), (v == torch.inf) & ceiling.isfinite()
    finite = (v.isfinite() | low | high).all(-1)
    finite = finite & ((asked[0] < torch.inf) & (asked[1] > -torch.inf)).all(-1)
    given = (low | high).any(-1)
    if not A.shared:
        finite = finite & A.data.isfinite().flatten(1).all(-1)
    lower, upper = (torch.where(low, floor, torch.where(high, ceiling, x)) for x in (lower, upper))
    lower, upper, clash = _forced(A, asked, lower, upper, _least_part(A, activation), eps)
    which = lower == upper
    # Where equations disagree about an end there is no solution: that is for others to prove.
    usable = finite & which.any(-1) & ~(clash & ~given)
    if not bool(usable.any()):
        return None
    return Held(index, which, lower, given).take(usable.nonzero().squeeze(-1))


def _least_part(A: LinearMap, activation: Activation) -> Float[Tensor, "*n I"]:
    """The least that one output of each equation moves it by, on its way through its range."""
    lower, upper = activation.range.bounds(A.data)
    ends = torch.where(lower.isfinite(), lower, upper).nan_to_num(0.0, 0.0, 0.0).abs()
    width = torch.minimum(upper - lower, ends.clamp_min(1))
    entries = A.dense().abs()
    return torch.where(entries > 0, entries * width, torch.inf).amin(-1)


def _forced(
    A: LinearMap,
    asked: tuple[Tensor, Tensor],
    lower: Tensor,
    upper: Tensor,
    least: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Bool[Tensor, "n"]]:
    """The bounds once every row at an end has fixed its outputs, until nothing new is fixed.

    With them, which samples have an output that is pushed both ways. Where an output moves its
    row by `least`, no more than the slack, the row does not tell where that output is.
    """
    clash, dtype = torch.zeros_like(lower[..., 0], dtype=torch.bool), lower.dtype
    above, below = A.over((A.data > 0).to(dtype)), A.over((A.data < 0).to(dtype))
    while True:
        free = lower < upper
        now, live = reach(A, lower, upper), _any(A, A.data != 0, free)
        tells = live & (least > slack(eps) * torch.maximum(now.least_terms, now.most_terms))
        ends = now.at_least(asked[1], eps), now.at_most(asked[0], eps)
        bottom, top = ((x & tells).to(dtype) for x in ends)
        up = free & (above.adjoint(top) + below.adjoint(bottom) > 0)
        down = free & (above.adjoint(bottom) + below.adjoint(top) > 0)
        if not bool((up | down).any()):
            return lower, upper, clash
        clash = clash | (up & down).any(-1)
        lower, upper = torch.where(up, upper, lower), torch.where(down & ~up, lower, upper)

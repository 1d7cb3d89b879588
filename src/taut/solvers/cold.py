"""Where to start if logits are so large that σ is nearly a step: the problem is a linear program.

    maximise vᵀz  with  A z = b  and  z between the ends of its range

Newton's steps on D crawl there, as most outputs have saturated and have no slope. Mehrotra's
predictor and corrector do not: z − lower and upper − z have multipliers `up` and `down`, with
v + Aᵀλ = down − up, and the products of the two, μ, fall far below what σ itself would keep from
the ends. Newton starts from there; where there is no solution, λ runs away, and is a proof.
"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.outcome import Status
from taut.solvers.base import relative
from taut.solvers.step import Search, State
from taut.solvers.verdict import Verdicts, certificates
from taut.systems import factorise

_LARGE = 10.0  # logits up to this are not even looked at
_COLD = 50.0  # by so much μ must begin above that of σ
_NEAR = 1e-2  # a residual of so little of its terms is left to Newton
_END, _CLOSE = 1e-8, 1e-10  # of the μ of σ, and of the terms of A z: there the path ends
_STEPS, _PROOFS = 25, 3  # at most; after so many each, a look whether λ is a proof
_NEARLY = 0.99  # of the way to the nearest end


@final
class _Point(NamedTuple):
    """Where n samples are on their paths; or a step."""

    multipliers: Float[Tensor, "n I"]  # of the basis
    z: Float[Tensor, "n K"]
    up: Float[Tensor, "n K"]
    down: Float[Tensor, "n K"]


@final
class _Ends(NamedTuple):
    """Of the range of each output; and the μ of σ, that of the output where it is least."""

    lower: Float[Tensor, "K"]
    upper: Float[Tensor, "K"]
    unit: Float[Tensor, ""]

    @staticmethod
    def of(search: Search) -> "_Ends":
        v, activation = search.task.v, search.task.activation
        lower, upper = (x.expand(v.shape[-1]) for x in activation.range.bounds(v))
        width = upper - lower
        slope = activation.slope(activation.inverse(lower + 0.5 * width))
        # In the middle −μ(log(z − lower) + log(upper − z)) is as curved as ψ: 8μ/width² = 1/slope.
        return _Ends(lower, upper, (width.square() / (8 * slope)).amin())

    @property
    def width(self) -> Float[Tensor, ""]:
        """The largest."""
        return (self.upper - self.lower).amax()

    def gap(self, point: _Point) -> Float[Tensor, "n 1"]:
        """μ: the mean of all products."""
        products = point.up * (point.z - self.lower) + point.down * (self.upper - point.z)
        return 0.5 * products.mean(-1, keepdim=True)

    def last(self, v: Float[Tensor, "n K"]) -> Float[Tensor, "n 1"]:
        """The μ that is small enough; a smaller one would be the rounding of z, times v."""
        rounding = 64 * torch.finfo(v.dtype).eps * self.width
        return (rounding * v.abs().amax(-1, keepdim=True)).clamp_min(_END * self.unit)


def warmed(search: Search, state: State) -> tuple[State, Verdicts | None]:
    """The states, with a better start where logits are that large and z is far from solved.

    With them verdicts, where a proof was found that there is no solution.
    """
    ends = _ends(search)
    if ends is None:
        return state, None
    largest = search.task.v.abs().amax(-1)
    # An output whose ends are one has a unit of 0, or NaN.
    cold = (0.25 * ends.width * largest > _COLD * ends.unit) & (ends.unit > 0)
    index = (cold & (state.relative > _NEAR)).nonzero().squeeze(-1)
    if not len(index):
        return state, None
    part = search.take(index)
    multipliers, status, proofs = _followed(part, ends)
    start = part.state(multipliers)
    found = ((status >= 0) & (start.relative < torch.inf)).nonzero().squeeze(-1)
    index = index[found]
    state.write(index, start.take(found))
    verdicts = torch.full_like(state.relative, -1, dtype=torch.long)
    verdicts[index] = status[found].where(status[found] == Status.INFEASIBLE, -1)
    return state, Verdicts(
        verdicts, torch.zeros_like(state.multipliers).index_copy_(0, index, proofs[found])
    )


def _ends(search: Search) -> _Ends | None:
    """None where σ has no two ends, where logits are small, or where this is not the way."""
    task = search.task
    if not task.activation.range.bounded or task.basis.map.iterative or not task.v.numel():
        return None
    if task.v.dtype != torch.float64 or search.rules.max_iterations < _STEPS:
        return None
    return _Ends.of(search) if task.v.abs().amax().item() > _LARGE else None


def _followed(search: Search, ends: _Ends) -> tuple[Tensor, Int[Tensor, "n"], Tensor]:
    """λ at the end of the path, 0 (CONVERGED) where it was reached, and proofs where INFEASIBLE."""
    place = torch.arange(len(search.task.v), device=search.task.v.device)
    multipliers, status = torch.zeros_like(search.task.b), place.clone()
    proofs, point = torch.zeros_like(multipliers), _first(search, ends)
    for step in range(1, _STEPS + 1):
        point = _step(search, point, ends)
        level = relative(search.task.residual(point.z), search.size_of_terms(point.z))
        close = level <= max(_CLOSE, 0.1 * search.cap)
        ended = close & (ends.gap(point) <= ends.last(search.task.v)).squeeze(-1)
        verdict = (~ended).long().neg_()
        if step % _PROOFS == 0:
            proven, found = certificates(search.task, point.multipliers, ~ended)
            proofs[place] = found
            verdict.masked_fill_(proven & _plain(search, found, ends), int(Status.INFEASIBLE))
        multipliers[place], status[place] = point.multipliers, verdict
        index, left = ended.nonzero().squeeze(-1), (verdict < 0).nonzero().squeeze(-1)
        if len(index):
            multipliers[place[index]] = _turned(search.take(index), _take(point, index), ends)
        if not len(left):
            break
        if len(left) < len(place):
            search, point, place = search.take(left), _take(point, left), place[left]
    return multipliers, status, proofs


def _plain(search: Search, proof: Float[Tensor, "n I"], ends: _Ends) -> Bool[Tensor, "n"]:
    """Is b so far out of reach that no z keeps the rule either? Else Newton may find one that does.

    For every z in the range λᵀ(b − A z) is at least the excess of λᵀb.
    """
    A, b = search.task.A, search.task.b
    image = A.adjoint(proof)
    excess = (proof * b).sum(-1) - torch.maximum(image * ends.lower, image * ends.upper).sum(-1)
    largest = torch.maximum(ends.lower.abs(), ends.upper.abs()).expand_as(image)
    return excess > 4 * search.cap * (proof.abs() * (b.abs() + A.abs().apply(largest))).sum(-1)


def _take(point: _Point, index: Int[Tensor, "m"]) -> _Point:
    return _Point(*(x.index_select(0, index) for x in point))


def _first(search: Search, ends: _Ends) -> _Point:
    """The middle of the range, with λ = 0 and multipliers of a size with v."""
    v, half = search.task.v, 0.5 * (ends.upper - ends.lower)
    root = torch.hypot(0.5 * v, 0.5 * v.abs().amax(-1, keepdim=True) * (half.amax() / half))
    middle = (ends.lower + half).expand_as(v)
    return _Point(torch.zeros_like(search.task.b), middle, root - 0.5 * v, root + 0.5 * v)


def _step(search: Search, point: _Point, ends: _Ends) -> _Point:
    """Predictor and corrector, with one factorisation."""
    task, basis = search.task, search.task.basis
    multipliers, z, up, down = point
    below, above, mu = z - ends.lower, ends.upper - z, ends.gap(point)
    rise, fall = up / below, down / above
    w = (rise + fall).reciprocal_()
    factor = factorise(basis.map, w, basis.left_out)
    u = basis.map.shifted_adjoint(task.v, multipliers)
    residual = search.restrict(task.residual(z))

    def move(goal_up: Tensor | float, goal_down: Tensor | float) -> _Point:
        """To where up·below and down·above are these goals times below and above."""
        pull = u + goal_up - goal_down
        dλ = factor.solve(residual + basis.map.apply(w * pull)).neg_()
        dz = basis.map.shifted_adjoint(pull, dλ).mul_(w)
        return _Point(dλ, dz, goal_up - up - rise * dz, goal_down - down + fall * dz)

    def after(move: _Point, part: float) -> _Point:
        """As far as z stays within its ends, and as far as multipliers stay positive."""
        outward = torch.maximum(-move.z / below, move.z / above).amax(-1, keepdim=True)
        downward = torch.maximum(-move.up / up, -move.down / down).amax(-1, keepdim=True)
        near, far = (part / x.clamp_min(part) for x in (outward, downward))
        dλ, dz, dup, ddown = move
        return _Point(multipliers + far * dλ, z + near * dz, up + far * dup, down + far * ddown)

    first = move(0.0, 0.0)
    goal = mu * (ends.gap(after(first, 1.0)) / mu) ** 3
    goal = torch.maximum(goal, 0.5 * ends.last(task.v))
    second = move((goal - first.z * first.up) / below, (goal + first.z * first.down) / above)
    return after(second, _NEARLY)


def _turned(search: Search, point: _Point, ends: _Ends) -> Float[Tensor, "n I"]:
    """λ with σ(v + Aᵀλ) = z in the outputs between their ends, where the path has u nearly 0."""
    basis = search.task.basis
    multipliers, z, up, down = point
    w = (up / (z - ends.lower) + down / (ends.upper - z)).reciprocal_()
    u, goal = down - up, search.task.activation.inverse(z)
    move = torch.where(goal.abs() > u.abs(), goal - u, 0).nan_to_num(0.0, 0.0, 0.0)
    return multipliers + factorise(basis.map, w, basis.left_out).solve(basis.map.apply(w * move))

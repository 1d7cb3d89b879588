"""Inequalities: from a problem to its sides in float64, through the chain, and back."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.backends import Rules
from taut.outcome import Outcome, Status
from taut.problems import Inequalities, Linear
from taut.solvers.around import held_outputs
from taut.solvers.chain import Chained, chain, proven
from taut.solvers.sides import EPS, Sides
from taut.solvers.split import Split
from taut.solvers.turned import Turned
from taut.systems import wide

#: Solves equations, in at most so many steps where it is torch that does.
Equations = Callable[[Linear, int], Outcome]


def inequalities(problem: Inequalities, rules: Rules, equations: Equations) -> Outcome:
    """A verdict on every sample. The equations alone are solved first, by `equations`:

    where they satisfy the rest, that is the answer, with the bits that they have without it. They
    get a few steps; all of them, and then the rest once more, where nothing else decides.
    """
    brief = min(rules.first, rules.max_iterations)
    outcome, long = _answered(problem, rules, equations, brief)
    open = (outcome.status == Status.MAX_ITERATIONS) | (outcome.status == Status.NONFINITE)
    left = (long & open).nonzero().squeeze(-1)
    if brief < rules.max_iterations and len(left):
        again, _ = _answered(problem.take(left), rules, equations, rules.max_iterations)
        again = replace(again, iterations=again.iterations + outcome.iterations[left])
        outcome = outcome.write(left, again)
    return replace(outcome, failed=int((outcome.status != Status.CONVERGED).sum()))


def _answered(
    problem: Inequalities, rules: Rules, equations: Equations, steps: int
) -> tuple[Outcome, Bool[Tensor, "n"]]:
    """The verdicts, and where the equations alone take more than these steps."""
    outcome = Outcome.open(problem.v, problem.lower.shape[-1])
    long = torch.zeros_like(outcome.status, dtype=torch.bool)
    if not len(problem.v):
        return outcome, long
    outcome, start, held, long = _equations_first(problem, outcome, equations, steps)
    left = outcome.left()
    if len(left):
        part = problem.take(left)
        start = None if start is None else start[left]
        held = held.take(left)
        outcome = outcome.write(left, _solved(part, held, start, rules))
        # Rows hold outputs to the rounding of their sides. What has no solution with them there may
        # have one, and else has a proof.
        again = held.forced & (outcome.status[left] != Status.CONVERGED)
        again = again.nonzero().squeeze(-1)
        if len(again):
            start = None if start is None else start[again]
            ends = _Ends(held.given, held.given).take(again)
            found = _solved(part.take(again), ends, start, rules)
            outcome = outcome.write(left[again], found)
    return outcome, long


@final
class _Ends(NamedTuple):
    """Outputs held at an end of the range, and where that is; NaN elsewhere."""

    end: Float[Tensor, "n K"] | None
    given: Float[Tensor, "n K"] | None  # by v itself, not by a row

    @staticmethod
    def of(problem: Inequalities) -> "_Ends":
        found = held_outputs(problem, problem.lower, problem.upper)
        if found is None:
            return _Ends(None, None)
        end = torch.full_like(problem.v, torch.nan, dtype=wide(problem.v))
        end[found.index] = found.end.to(end.dtype).masked_fill(~found.which, torch.nan)
        return _Ends(end, end.masked_fill(problem.v.isfinite(), torch.nan))

    def take(self, index: Tensor) -> "_Ends":
        return _Ends(*(None if x is None else x[index] for x in self))

    @property
    def forced(self) -> Bool[Tensor, "*n"]:
        """Samples with outputs that a row holds."""
        if self.end is None or self.given is None:
            return torch.zeros((), dtype=torch.bool)
        return (~self.end.isnan() & self.given.isnan()).any(-1)

    def moved(self, problem: Inequalities) -> Bool[Tensor, "*n"]:
        """Samples in which v holds an output at a bound, not at the end of the range."""
        if self.given is None or not problem.bounds:
            return torch.zeros((), dtype=torch.bool)
        lower, upper = problem.prepared.activation.range.bounds(self.given)
        end = torch.where(problem.v > 0, upper, lower)
        return (~self.given.isnan() & (self.given != end)).any(-1)


def _equations_first(
    problem: Inequalities, outcome: Outcome, equations: Equations, steps: int
) -> tuple[Outcome, Tensor | None, _Ends, Bool[Tensor, "n"]]:
    """What the equations alone decide; where to start with the rest; which outputs are held.

    Last: where the equations are not decided within these steps.
    """
    held = _Ends.of(problem)
    if problem.start is not None or not problem.equations:
        none = torch.zeros_like(outcome.status, dtype=torch.bool)
        return outcome, problem.start, held, none
    first = equations(_alone(problem), steps)
    long = first.status == Status.MAX_ITERATIONS
    more = problem.lower.shape[-1] - problem.equations
    multipliers = torch.nn.functional.pad(first.multipliers, (0, more))
    sides = _sides(problem, _Ends(None, None))
    z = first.z.to(sides.v.dtype)
    good = sides.keeps(z, 2 * EPS, problem.equations)
    good = good & (sides.clip(z) == z).all(-1) & ~_empty(sides)
    kept = (first.status == Status.CONVERGED) & good & ~held.forced
    refuted = (first.status == Status.INFEASIBLE) | (first.status == Status.INCONSISTENT)
    decided = kept | (refuted & ~held.moved(problem))  # else with this output somewhere else
    index = decided.nonzero().squeeze(-1)
    first = replace(first, multipliers=multipliers, residual=problem.largest_violation(first.z))
    outcome = outcome.write(index, first.take(index))
    usable = (first.status == Status.CONVERGED).unsqueeze(-1) & ~first.u.isinf().any(-1, True)
    return outcome, multipliers.where(usable, 0), held, long


def _alone(problem: Inequalities) -> Linear:
    """The equations alone."""
    prepared = getattr(problem.prepared, "alone", problem.prepared)
    b = problem.lower[:, : problem.equations]
    return Linear(prepared, problem.v, prepared.map.data, b)


def _sides(problem: Inequalities, held: _Ends) -> Sides:
    """Rows, sides and bounds in float64; held outputs have both bounds at their end."""
    dtype = wide(problem.v)
    v, lower, upper = (x.to(dtype) for x in (problem.v, problem.lower, problem.upper))
    C = problem.prepared.map.over(problem.data.to(dtype))
    floor = ceiling = None
    if problem.bounds:
        floor, ceiling = (x.to(dtype) for x in problem.bounds)
    if held.end is not None:
        which = ~held.end.isnan()
        least, most = held.end.nan_to_num(-torch.inf), held.end.nan_to_num(torch.inf)
        floor = least if floor is None else torch.maximum(floor, least)
        ceiling = most if ceiling is None else torch.minimum(ceiling, most)
        v = v.masked_fill(which, 0)
    activation, line = problem.prepared.activation, problem.prepared.line
    return Sides(activation, line, C, v, lower, upper, floor, ceiling)


def _empty(sides: Sides) -> Bool[Tensor, "n"]:
    """Where a lower side is above the upper one."""
    empty = (sides.lower > sides.upper).any(-1)
    if sides.floor is not None and sides.ceiling is not None:
        least, most = sides.ends()
        empty = empty | (least > most).any(-1)
    return empty


def _finite(sides: Sides) -> Bool[Tensor, "n"]:
    """Which samples have numbers only; a side that is not there is one."""
    n, whole = len(sides.v), sides.C.data.isfinite()
    fine = whole.all().expand(n) if sides.C.shared else whole.reshape(n, -1).all(-1)
    fine = fine & sides.v.isfinite().all(-1)
    pairs = [(sides.lower, sides.upper)]
    if sides.floor is not None and sides.ceiling is not None:
        pairs.append((sides.floor, sides.ceiling))
    for low, high in pairs:
        fine = fine & ((low < torch.inf) & (high > -torch.inf)).all(-1)
    return fine & ~(sides.lower.isinf() & sides.equal).any(-1)


def _solved(problem: Inequalities, held: _Ends, start: Tensor | None, rules: Rules) -> Outcome:
    """The samples that the equations alone do not decide."""
    sides = _sides(problem, held)
    finite, empty = _finite(sides), _empty(sides)
    index = (finite & ~empty).nonzero().squeeze(-1)
    outcome = _undecided(problem, sides, finite)
    if len(index):
        part, own = problem.take(index), sides.take(index)
        begin = None if start is None else _near(own, start[index].to(own.v.dtype))
        solved = _decided(part, own, begin, rules)
        outcome = outcome.write(index, _outcome(part, own, held.take(index), solved, rules))
    return outcome


def _undecided(problem: Inequalities, sides: Sides, finite: Tensor) -> Outcome:
    """NONFINITE samples, and those whose sides are INFEASIBLE by themselves."""
    outcome = Outcome.open(problem.v, problem.lower.shape[-1])
    infeasible = torch.full_like(outcome.status, int(Status.INFEASIBLE))
    status = infeasible.where(finite, int(Status.NONFINITE))
    z = sides.clip(problem.prepared.activation.sigma(sides.v)).to(problem.v.dtype)
    z = torch.where(finite.unsqueeze(-1), _limited(sides, z), z)
    residual = problem.largest_violation(z)
    return replace(outcome, z=z, u=problem.v.clone(), residual=residual, status=status)


def _without_idle(
    sides: Sides, multipliers: Tensor, u: Tensor, done: Bool[Tensor, "n"]
) -> tuple[Tensor, Tensor]:
    """A row whose outputs all stand still, held or between equal bounds, has nothing to push."""
    if sides.floor is None or sides.ceiling is None:
        return multipliers, u
    free = (sides.floor < sides.ceiling).to(u.dtype)
    pushes = sides.C.over((sides.C.data != 0).to(u.dtype)).apply(free) > 0
    idle = ~pushes & (multipliers != 0) & done.unsqueeze(-1)
    multipliers = multipliers.masked_fill(idle, 0)
    moved = idle.any(-1, keepdim=True)
    return multipliers, torch.where(moved, sides.C.shifted_adjoint(sides.v, multipliers), u)


def _limited(sides: Sides, z: Float[Tensor, "n K"]) -> Float[Tensor, "n K"]:
    """z of samples without a solution, where it has overflowed: so that C z can be computed."""
    size = sides.C.abs().apply(torch.ones_like(sides.v))
    size = size.amax(-1, keepdim=True).clamp_min(1) if size.shape[-1] else torch.ones_like(z[:, :1])
    top = (0.25 * torch.finfo(z.dtype).max / size).to(z.dtype)
    return torch.minimum(torch.maximum(z.nan_to_num(0.0), -top), top)


def _near(sides: Sides, start: Tensor) -> Tensor:
    """A start that is not a number, or absurdly far, is worse than none."""
    y = sides.C.abs().adjoint(start.nan_to_num().abs()).amax(-1)
    size = sides.own_size + sides.v.abs().amax(-1)
    if sides.bends is not None:  # outputs that do not bend go as far as the sides ask
        size = size + sides.extent
    near = start.isfinite().all(-1) & (y <= 1e3 * size)
    return start.nan_to_num().where(near.unsqueeze(-1), 0)


def _decided(problem: Inequalities, sides: Sides, start: Tensor | None, rules: Rules) -> Chained:
    """The chain, in the basis of the equations where they are nearly dependent.

    What that does not decide for the rows as they were given, the chain with these does.
    """
    E, dtype = problem.equations, problem.v.dtype
    turned = Turned.of(sides, problem.prepared.basis_in(sides.v.dtype), E)
    if turned is None:
        return _chained(sides, E, start, rules, dtype)
    found, decided = _by_turning(turned, sides, start, rules, dtype)
    left = (~decided).nonzero().squeeze(-1)
    if len(left):
        again = None if start is None else start[left]
        found.write(left, _chained(sides.take(left), E, again, rules, dtype))
    return found


def _by_turning(
    turned: Turned, sides: Sides, start: Tensor | None, rules: Rules, dtype: torch.dtype
) -> tuple[Chained, Bool[Tensor, "n"]]:
    """The chain in the basis of the equations, and which verdicts hold for the rows as given."""
    E, begin = turned.equations, None if start is None else turned.enter(start)
    own = turned.sides(sides)
    found = _chained(own, E, begin, rules, dtype)
    for last in (False, False, True):
        point, status, _ = found
        multipliers = turned.leave(point.multipliers)
        kept = sides.keeps(point.z, rules.cap(dtype), multipliers=multipliers)
        left = ((status == Status.CONVERGED) & ~kept).nonzero().squeeze(-1)
        if last or not len(left):
            break
        few, z, ν = turned.take(left), point.z[left], point.multipliers[left]
        again = few.corrected(own.take(left), sides.take(left), z)
        found.write(left, _chained(again, E, ν, rules, dtype))
    reach, proof = proven(multipliers, sides, dtype == torch.float64)
    refuted = (status == Status.INFEASIBLE) & (reach > 0)
    multipliers = torch.where(refuted.unsqueeze(-1), proof, multipliers)
    found = found._replace(point=point._replace(multipliers=multipliers, r=sides.C.apply(point.z)))
    return found, refuted | ((status == Status.CONVERGED) & kept)


def _chained(
    sides: Sides, equations: int, start: Tensor | None, rules: Rules, dtype: torch.dtype
) -> Chained:
    """The chain, with rows of one entry as bounds on z."""
    exact, split = dtype == torch.float64, Split.of(sides.C, equations)
    if split is None:
        return chain(sides, start, rules, exact)
    box = split.box(sides)
    inner = split.within(sides, box)
    begin = None if start is None else start[:, split.rest]
    point, status, iterations = chain(inner, begin, rules, exact)
    whole = split.whole(sides, box, point)
    # A row that asks for the end of an open range has no finite multiplier.
    ok = whole.multipliers.isfinite().all(-1)
    status = status.where(ok | (status != Status.CONVERGED), int(Status.MAX_ITERATIONS))
    kept = ok.unsqueeze(-1)
    whole = whole._replace(
        multipliers=whole.multipliers.where(kept, 0), u=torch.where(kept, whole.u, point.u)
    )
    least, most = inner.ends()
    beyond = box.floor > most, box.ceiling < least
    proof = split.proof(sides, box, point.multipliers, beyond)
    reach, proof = proven(proof, sides, exact)
    empty = (status == Status.INFEASIBLE) | (beyond[0] | beyond[1]).any(-1)
    status = torch.where(empty, int(Status.INFEASIBLE), status)
    status = status.where(~empty | (reach > 0), int(Status.MAX_ITERATIONS))
    multipliers = torch.where(empty.unsqueeze(-1), proof, whole.multipliers)
    return Chained(whole._replace(multipliers=multipliers), status, iterations)


def _outcome(
    problem: Inequalities, sides: Sides, held: _Ends, solved: Chained, rules: Rules
) -> Outcome:
    """In the dtype of v; CONVERGED where every row keeps the rule."""
    (multipliers, u, z, _, _), status, iterations = solved
    dtype = problem.v.dtype
    broken = (status == Status.CONVERGED) & ~sides.keeps(
        z, rules.cap(dtype), multipliers=multipliers
    )
    status = status.masked_fill(broken, int(Status.MAX_ITERATIONS))
    multipliers, u = _without_idle(sides, multipliers, u, status == Status.CONVERGED)
    if held.end is not None:
        which = ~held.end.isnan()
        upper = problem.prepared.activation.range.bounds(held.end)[1]
        side = torch.where(held.end == upper, torch.inf, -torch.inf)
        side = torch.where(problem.v.isinf(), problem.v.to(side.dtype), side)
        u = torch.where(which, side, u)
    multipliers, u, z = (x.to(dtype) for x in (multipliers, u, z))
    fits = multipliers.isfinite().all(-1) & z.isfinite().all(-1)
    fits = fits & sides.C.abs().apply(solved.point.z.abs()).to(dtype).isfinite().all(-1)
    # A proof does not depend on how far z got.
    refuted = (status == Status.INFEASIBLE) & multipliers.isfinite().all(-1)
    z = torch.where(refuted.unsqueeze(-1), _limited(sides, z), z)
    status = status.where(fits | refuted, int(Status.NONFINITE))
    residual = problem.largest_violation(z)
    failed = int((status != Status.CONVERGED).sum())
    made = Outcome(z, multipliers, u, residual, iterations, status, failed)
    return replace(made, held=held.end is not None)

"""Newton's method on D along projected arcs: multipliers that would change their sign stop at 0."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.backends import One, Rules
from taut.outcome import Status
from taut.solvers.sides import EPS, TINY, Levels, Point, Sides, masked
from taut.systems import Factor, solve_lifted

_STALLED = 3  # iterations without progress after which a sample may have stopped


@final
class Found(NamedTuple):
    """Every sample as it was when it was closed; status −1 where it is open still."""

    point: Point
    status: Int[Tensor, "N"]
    iterations: Int[Tensor, "N"]
    level: Float[Tensor, "N"]  # of the optimality conditions, over |side| + |C||z|


@final
class _Progress(NamedTuple):
    """How the samples being worked on have come along."""

    place: Int[Tensor, "n"]  # in the batch
    best: Float[Tensor, "n"]  # the smallest level so far
    stalls: Int[Tensor, "n"]  # for how many iterations it has not been halved
    broken: Int[Tensor, "n"]  # how often the active rows depended on each other
    still: Int[Tensor, "n"]  # for how many iterations ν has not moved: it will not any more

    def after(self, broken: Tensor, stood: Bool[Tensor, "n"]) -> "_Progress":
        """With one more step, after which ν is where it `stood`."""
        still = (self.still + 1).masked_fill(~stood, 0)
        return self._replace(broken=self.broken + broken, still=still)

    def take(self, index: Tensor) -> "_Progress":
        return _Progress(*(x[index] for x in self))


def newton(
    sides: Sides,
    start: Float[Tensor, "N M"] | None,
    rules: Rules,
    budget: int,
    last: bool = False,
    one: One | None = None,
) -> Found:
    """At most `budget` steps from `start`; by `one` where there is such code.

    A first attempt leaves a sample open when its active rows depend on each other: the interior
    point method does not mind. The `last` one damps its steps instead.
    """
    start = None if start is None else _allowed(sides, start)
    found = None if one is None else _compiled(sides, start, rules, budget, last, one)
    if found is not None:
        return found
    n, device = len(sides.v), sides.v.device
    point = _begun(sides, start)
    ν = point.multipliers
    place = torch.arange(n, device=device)
    found = Found(Point(*(x.clone() for x in point)), place * 0 - 1, place * 0, ν.new_ones(n))
    progress = _Progress(place, ν.new_full((n,), torch.inf), *(place * 0 for _ in range(3)))
    for iteration in range(budget + 1):
        if not len(point.u):
            break
        s = sides.gradient(point.multipliers, point.r)
        levels, s, noise = sides.measure(point, s)
        stalls = (progress.stalls + 1).masked_fill(levels.plain < 0.5 * progress.best, 0)
        best = torch.minimum(progress.best, levels.plain)
        progress = progress._replace(best=best, stalls=stalls)
        done = _converged(levels, stalls, rules)
        stopped = ~done & (levels.rough <= 4 * EPS) & (stalls >= _STALLED)
        if bool(stopped.any()):
            point, stopped = _settled(sides, point, stopped, rules)
            done = done | stopped
        closed = done | (iteration == budget) | (progress.still > _STALLED)
        if not last:
            closed = closed | (progress.broken > 1)
        if bool(closed.any()):
            _close(found, sides, point, progress.place, closed, done, levels, iteration, rules)
            left = (~closed).nonzero().squeeze(-1)
            sides, point, progress = sides.take(left), point.take(left), progress.take(left)
            s, noise, levels = s[left], noise[left], Levels(*(x[left] for x in levels))
            if not len(left):
                break
        orthant = torch.where(point.multipliers != 0, point.multipliers.sign(), -s.sign())
        active = (orthant != 0) | sides.equal
        s = s.masked_fill(~active, 0)
        damping = 1e-4 * levels.plain.clamp(max=1.0) if last else torch.zeros_like(levels.plain)
        step, broken = _direction(sides, point.w, s, active, damping, levels.plain, rules)
        step = step.where(step.isfinite().all(-1, keepdim=True), 0)
        before, point = point, _search(sides, point, step, s, noise, orthant, rules)
        progress = progress.after(broken, (point.multipliers == before.multipliers).all(-1))
    return found


def _compiled(
    sides: Sides, start: Tensor | None, rules: Rules, budget: int, last: bool, one: One
) -> Found | None:
    """The same by the compiled code."""
    lowest, highest = sides.ends()
    given = {"v": sides.v, "lower": sides.lower, "upper": sides.upper, "floor": sides.floor}
    given |= {"ceiling": sides.ceiling, "lowest": lowest, "highest": highest}
    given["unit"] = sides.unit
    start = torch.zeros_like(sides.lower) if start is None else start
    found = one.newton(sides.C, given, start, rules, budget, last)
    if found is None:
        return None
    point = Point(*(found[name] for name in ("multipliers", "u", "z", "w", "r")))
    return Found(point, found["status"], found["iterations"], found["level"])


def _allowed(sides: Sides, start: Tensor) -> Float[Tensor, "N M"]:
    """A start without signs that the sides do not allow."""
    none = (sides.lower == -torch.inf) & (start > 0) | (sides.upper == torch.inf) & (start < 0)
    return start.masked_fill(none, 0)


def _begun(sides: Sides, start: Tensor | None) -> Point:
    """At the start; at 0 where C z overflows there."""
    if start is None:
        return sides.point(torch.zeros_like(sides.lower))
    point = sides.point(start)
    finite = point.finite()
    if bool(finite.all()):
        return point
    return sides.point(point.multipliers.where(finite.unsqueeze(-1), 0))


def _converged(levels: Levels, stalls: Tensor, rules: Rules) -> Bool[Tensor, "n"]:
    stopped = (levels.rough <= 4 * EPS) | ((levels.rough <= rules.rough) & (stalls > 1))
    return (levels.plain <= max(rules.tol or 0.0, 8 * EPS)) | (
        (levels.fair <= rules.fair) & stopped
    )


def _settled(
    sides: Sides, point: Point, which: Bool[Tensor, "n"], rules: Rules
) -> tuple[Point, Bool[Tensor, "n"]]:
    """What is left is the rounding of u: where z without it keeps the rule, that is the answer."""
    index = which.nonzero().squeeze(-1)
    part = sides.take(index)
    better = part.refined(point.take(index), rules.rough)
    kept = part.keeps(better.z, 0.5 * rules.fair, multipliers=better.multipliers)
    index, better = index[kept], better.take(kept.nonzero().squeeze(-1))
    point = Point(*(x.index_copy(0, index, y) for x, y in zip(point, better, strict=True)))
    return point, torch.zeros_like(which).index_fill(0, index, True)


def _close(
    found: Found,
    sides: Sides,
    point: Point,
    place: Tensor,
    closed: Tensor,
    done: Tensor,
    levels: Levels,
    iteration: int,
    rules: Rules,
) -> None:
    """Write what became of the closed samples."""
    index = closed.nonzero().squeeze(-1)
    at, part = place[index], point.take(index)
    rough = (done & (levels.plain > 4 * EPS))[index].nonzero().squeeze(-1)
    if len(rough):
        better = sides.take(index[rough]).refined(part.take(rough), rules.rough)
        part = Point(*(x.index_copy(0, rough, y) for x, y in zip(part, better, strict=True)))
    found.point.write(at, part)
    found.status.index_copy_(0, at, done[index].long() - 1)  # CONVERGED is 0
    found.iterations.index_fill_(0, at, iteration)
    found.level.index_copy_(0, at, levels.plain[index])


assert int(Status.CONVERGED) == 0  # noqa: S101


def _direction(
    sides: Sides,
    w: Tensor,
    s: Tensor,
    active: Tensor,
    damping: Tensor,
    level: Tensor,
    rules: Rules,
) -> tuple[Tensor, Bool[Tensor, "n"]]:
    """−H⁻¹s on the active rows, and where those depend on each other.

    Where H is too large to be formed, only as exact as the `level` of s is worth.
    """
    if sides.C.iterative:
        lift = sides.C.gram_diagonal(w) * (1e-14 + damping.unsqueeze(-1))
        enough = (0.1 * level).clamp(1e-13, 1e-2)
        step = solve_lifted(sides.C, w, lift, -s, ~active, enough)
        return step, torch.zeros_like(active[:, 0])
    gram = sides.C.gram(w)
    diagonal = gram.diagonal(dim1=-2, dim2=-1).clone()
    own = diagonal * (1 + 1e-14 + damping.unsqueeze(-1)) + TINY
    gram = masked(gram, active, 0.0)
    gram.diagonal(dim1=-2, dim2=-1).copy_(torch.where(active, own, 1))
    triangle, info = torch.linalg.cholesky_ex(gram)
    pivots = triangle.diagonal(dim1=-2, dim2=-1).square() / own
    pivots = torch.where(active, pivots, 1)
    least = pivots.amin(-1) if pivots.shape[-1] else torch.ones_like(damping)
    broken = (info > 0) | ~(least > rules.dependent)
    bad, lift = (info > 0).nonzero().squeeze(-1), 1e-12
    while len(bad) and lift < 1:
        few = gram[bad]
        few.diagonal(dim1=-2, dim2=-1).add_(torch.where(active, lift * diagonal + TINY, 0)[bad])
        again, info = torch.linalg.cholesky_ex(few)
        triangle.index_copy_(0, bad, again)
        bad, lift = bad[info > 0], 100 * lift
    step = Factor(triangle, None, None).solve(-s)
    return torch.where(active, step, 0), broken


@final
class _Trial(NamedTuple):
    """How long a step is tried, for each sample."""

    length: Float[Tensor, "n"]
    low: Float[Tensor, "n"]  # the longest that was too short
    grows: Bool[Tensor, "n"]


def _search(
    sides: Sides,
    point: Point,
    step: Tensor,
    s: Tensor,
    noise: Tensor,
    orthant: Tensor,
    rules: Rules,
) -> Point:
    """ν(α) = [ν + α step] in its orthant, judged by the slope of D at the end of the chord."""
    far = sides.reach(step)
    whole, new = torch.ones_like(far), Point(*(x.clone() for x in point))
    first = whole if sides.straight else torch.where(far > rules.reach, rules.reach / far, whole)
    trial = _Trial(first, torch.zeros_like(far), torch.ones_like(far, dtype=torch.bool))
    side = torch.where(orthant > 0, sides.lower, sides.upper)
    active = (orthant != 0) | sides.equal
    todo = torch.arange(len(far), device=far.device)
    start = point.multipliers
    for _ in range(rules.trials):
        ν = start + trial.length.unsqueeze(-1) * step
        ν = torch.where(sides.equal | (ν * orthant > 0), ν, 0)
        here = sides.point(ν)
        new.write(todo, here)
        change = ν - start
        before = (change * s).sum(-1).abs()
        after = (change * torch.where(active, here.r - side, 0)).sum(-1)
        longer, trial = _judged(trial, before, after, (change.abs() * noise).sum(-1), sides, rules)
        index = longer.nonzero().squeeze(-1)
        if not len(index):
            break
        if len(index) < len(todo):
            todo, sides, trial = todo[index], sides.take(index), _taken(trial, index)
            start, step, s, noise = (x[index] for x in (start, step, s, noise))
            orthant, side, active = (x[index] for x in (orthant, side, active))
    finite = new.finite()  # else no length was short enough
    if bool(finite.all()):
        return new
    pairs = zip(new, point, strict=True)
    return Point(*(torch.where(finite.unsqueeze(-1), x, y) for x, y in pairs))


def _judged(
    trial: _Trial, before: Tensor, after: Tensor, noise: Tensor, sides: Sides, rules: Rules
) -> tuple[Bool[Tensor, "n"], _Trial]:
    """Which samples try another length, and which."""
    length, low, grows = trial
    long = ~(after <= rules.overshoot * before + noise)
    short = (after < -rules.undershoot * before) & grows & (not sides.straight)
    cut = (before / (before + after)).nan_to_num(rules.cut).clamp(rules.cut, 0.5)
    other = torch.where(short, rules.growth * length, length)
    other = torch.where(long, low + (length - low) * cut, other)
    trial = _Trial(other, torch.where(short, length, low), short & (length < rules.longest))
    return long | short, trial


def _taken(trial: _Trial, index: Tensor) -> _Trial:
    return _Trial(*(x[index] for x in trial))

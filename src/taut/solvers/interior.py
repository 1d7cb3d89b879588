"""A primal-dual interior point method on D, for samples whose active rows Newton does not find.

It follows the path of path.py. Bounds on z, which are rows there, are eliminated from the system.
"""

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.backends import EVERY, One
from taut.solvers.path import Path, Rows, begin, error_of, mean_gap, most_of, residuals_of
from taut.solvers.sides import TINY, Sides
from taut.systems import solve_lifted

_GROWTH = 3.0  # of t, a step
_REACH = 4.0  # how far u may move in a step
_NEARLY = 0.99  # of the way to the next slack or multiplier that would be 0
_LOOSE = 0.03  # how far C z may be from what was predicted while t moves

LOOKS = (4, 8, 16, 32, 64)  # iterations after which a watch is asked

#: Multipliers of some samples, at one or more iterations: which of them need no more work?
Watch = Callable[[Tensor, Float[Tensor, "n tries M"]], Tensor]


@final
class _Move(NamedTuple):
    """A direction for all of them."""

    ν: Tensor
    u: Tensor
    r: Tensor
    below: Tensor
    above: Tensor
    up: Tensor
    down: Tensor


@final
class Ended(NamedTuple):
    """What the method ended with."""

    start: Float[Tensor, "N M"]  # ν with 0 in the rows that look inactive, for Newton to polish
    raw: Float[Tensor, "N M"]  # ν as it was
    iterations: Int[Tensor, "N"]


def interior(
    sides: Sides,
    tol: float,
    budget: int,
    watch: Watch,
    looks: tuple[int, ...] = LOOKS,
    one: One | None = None,
) -> Ended:
    """Follow the path to `tol`, or for `budget` steps; by `one` where there is such code.

    The `watch` is asked about samples that are open at the end, and after so many steps (`looks`).
    """
    rows, path = begin(Rows.of(sides))
    n, count = sides.lower.shape
    place = torch.arange(n, device=sides.v.device)
    ended = Ended(sides.v.new_zeros(n, count), sides.v.new_zeros(n, count), place * 0)
    taken = 0
    for until in (*(x for x in looks if x < budget), budget):
        path, made, stop, seen = _walk(rows, path, tol, until - taken, one)
        open, taken = ~stop, until
        if seen.shape[1] and bool(open.any()):
            index = open.nonzero().squeeze(-1)
            norm = rows.norm if rows.C.shared else rows.norm[index].unsqueeze(1)
            stop = stop.index_put((index,), watch(place[index], seen[index] / norm))
        ended.iterations.index_add_(0, place, made)
        stop = stop | (until == budget)
        index, left = stop.nonzero().squeeze(-1), (~stop).nonzero().squeeze(-1)
        _end(ended, rows.take(index), path.take(index), place[index])
        if not len(left):
            break
        rows, path, place = rows.take(left), path.take(left), place[left]
    return ended


def _walk(
    rows: Rows, path: Path, tol: float, steps: int, one: One | None
) -> tuple[Path, Int[Tensor, "n"], Bool[Tensor, "n"], Float[Tensor, "n tries M"]]:
    """So many steps: where they end, how many were made, who has stopped, and ν now and then."""
    found = None if one is None else _compiled(rows, path, tol, steps, one)
    if found is not None:
        return found
    n, count = len(rows.v), rows.C.shape[0]
    whole, place = Path(*(x.clone() for x in path)), torch.arange(n, device=rows.v.device)
    made, stopped = place * 0, torch.zeros_like(place, dtype=torch.bool)
    seen = path.ν.new_zeros(n, steps // EVERY, count)
    for step in range(steps + 1):
        gap = mean_gap(rows, path)
        size, error = error_of(rows, path)
        if step and step % EVERY == 0:
            seen[place, step // EVERY - 1] = path.ν[:, :count]
        stop = ((error <= tol) & (path.t == 1).squeeze(-1)) | ~(error < torch.inf)
        over = stop | (step == steps)
        if bool(over.any()):
            index, left = over.nonzero().squeeze(-1), (~over).nonzero().squeeze(-1)
            for x, y in zip(whole, path, strict=True):
                x.index_copy_(0, place[index], y[index])
            made.index_fill_(0, place[index], step)
            stopped.index_copy_(0, place[index], stop[index])
            if not len(left):
                break
            rows, path, place = rows.take(left), path.take(left), place[left]
            gap, size = gap[left], size[left]
        path = _step(rows, path, gap, size)
    return whole, made, stopped, seen


def _compiled(
    rows: Rows, path: Path, tol: float, steps: int, one: One
) -> tuple[Path, Tensor, Tensor, Tensor] | None:
    """The same by the compiled code."""
    names = {"v": "v", "lower": "lower", "upper": "upper", "equal": "equal", "low": "has_lower"}
    names |= {"high": "has_upper", "unit_z": "unit_z", "unit_u": "unit_u"}
    given = {name: getattr(rows, its) for name, its in names.items()}
    path = Path(*(x.clone(memory_format=torch.contiguous_format) for x in path))
    point: dict[str, Tensor] = dict(zip(_PATH, path, strict=True))
    found = one.walk(rows.C, given, point, rows.boxed, tol, steps)
    if found is None:
        return None
    return path, found["iterations"], found["stopped"], found["seen"]


_PATH: tuple[str, ...] = "t", "nu", "below", "above", "up", "down", "u", "z", "r"


def _end(ended: Ended, rows: Rows, path: Path, place: Tensor) -> None:
    """Write ν, in the units that the rows were given in."""
    count = rows.C.shape[0]
    low = rows.has_lower & (path.up * rows.unit_z > path.below * rows.unit_u)
    high = rows.has_upper & (path.down * rows.unit_z > path.above * rows.unit_u)
    ν = torch.where(rows.equal | low | high, path.ν, 0)
    ν = torch.where((low & ~high & (ν < 0)) | (high & ~low & (ν > 0)), 0, ν)
    ended.start.index_copy_(0, place, ν[:, :count] / rows.norm)
    ended.raw.index_copy_(0, place, path.ν[:, :count] / rows.norm)


@final
class _System:
    """(C W Cᵀ + Θ) dν = rhs at a point of the path, factorised; bounds on z are eliminated."""

    def __init__(self, rows: Rows, path: Path):
        self.rows, self.path = rows, path
        low, high = rows.has_lower, rows.has_upper
        self.free = ~(rows.equal | low | high)
        self.w = rows.activation.slope(path.u)
        self.lift_low = torch.where(low, path.up / path.below, 0)
        self.lift_high = torch.where(high, path.down / path.above, 0)
        Θ = (self.lift_low + self.lift_high).clamp_min(1e-30).reciprocal()
        self.Θ = torch.where(rows.equal, 0, torch.where(self.free, 1e30, Θ))
        self.residuals = residuals_of(rows, path)
        grown = torch.minimum(path.t * (_GROWTH - 1), 1 - path.t)
        self.dt, self.moved = grown, grown * rows.apply(self.w * rows.v)
        count, w = rows.C.shape[0], self.w
        if rows.boxed:
            own = self.Θ[:, count:]
            self.share = (w + own).reciprocal()
            w = w * (own * self.share)
        self.eased = w  # by bounds on z, which are eliminated
        self.triangle = None if rows.C.iterative else self._factor(w)

    def _factor(self, w: Tensor) -> Tensor:
        count = self.rows.C.shape[0]
        gram = self.rows.C.gram(w)
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        # Relative to each row's own diagonal: rows under exp differ by 14 digits.
        own = diagonal.clone() + TINY
        diagonal.add_(self.Θ[:, :count] + 1e-14 * own)
        triangle, info = torch.linalg.cholesky_ex(gram)
        bad, lift = (info > 0).nonzero().squeeze(-1), 1e-13
        while len(bad) and lift < 1e-2:
            diagonal[bad] = diagonal[bad] + lift * own[bad]
            again, info = torch.linalg.cholesky_ex(gram[bad])
            triangle.index_copy_(0, bad, again)
            bad, lift = bad[info > 0], 30 * lift
        return triangle

    def _solve(self, rhs: Tensor) -> Float[Tensor, "n L"]:
        rows, count = self.rows, self.rows.C.shape[0]
        rhs = rhs.masked_fill(self.free, 0)
        first = rhs
        if rows.boxed:
            own = rhs[:, count:]
            first = rhs[:, :count] - rows.C.apply(self.w * own * self.share)
        if self.triangle is None:
            solved = solve_lifted(rows.C, self.eased, self.Θ[:, :count], first, None)
        else:
            solved = torch.cholesky_solve(first.unsqueeze(-1), self.triangle).squeeze(-1)
        if not rows.boxed:
            return solved.masked_fill(self.free, 0)
        solved = solved.masked_fill(self.free[:, :count], 0)
        rest = (rhs[:, count:] - self.w * rows.C.adjoint(solved)) * self.share
        return torch.cat([solved, rest.masked_fill(self.free[:, count:], 0)], -1)

    def move(self, goal_low: Tensor, goal_high: Tensor) -> _Move:
        """The direction in which slack times multiplier changes by these goals."""
        rows, path = self.rows, self.path
        equal, lower, upper = self.residuals
        low, high = rows.has_lower, rows.has_upper
        pull = torch.where(low, (goal_low - path.up * lower) / path.below, 0)
        pull = pull - torch.where(high, (goal_high - path.down * upper) / path.above, 0)
        dν = self._solve(torch.where(rows.equal, -equal, self.Θ * pull) - self.moved)
        du = rows.adjoint(dν) + self.dt * rows.v
        dr = rows.apply(self.w * du)
        below, above = dr + lower, upper - dr
        up = torch.where(low, (goal_low - path.up * below) / path.below, 0)
        down = torch.where(high, (goal_high - path.down * above) / path.above, 0)
        # The nearly inactive side by its own formula, the other from dν: nothing cancels.
        nearer, both = self.lift_low >= self.lift_high, low & high
        new_up = torch.where(both, torch.where(nearer, dν + down, up), torch.where(low, dν, 0))
        new_down = torch.where(both, torch.where(nearer, down, up - dν), torch.where(high, -dν, 0))
        tight = (goal_low - path.below * new_up) / path.up.clamp_min(TINY)
        below = torch.where(low, torch.where(self.lift_low > 1, tight, below), 0)
        tight = (goal_high - path.above * new_down) / path.down.clamp_min(TINY)
        above = torch.where(high, torch.where(self.lift_high > 1, tight, above), 0)
        return _Move(dν, du, dr, below, above, new_up, new_down)

    def longest(self, move: _Move, part: float) -> Float[Tensor, "n 1"]:
        """The longest step, up to 1, in which all stays positive and u moves not too far."""
        rows, path = self.rows, self.path
        low, high = rows.has_lower, rows.has_upper
        length = torch.full_like(path.t, torch.inf)
        pairs = [(path.below, move.below, low), (path.up, move.up, low)]
        pairs += [(path.above, move.above, high), (path.down, move.down, high)]
        for x, dx, there in pairs:
            ratio = torch.where(there & (dx < 0), -x / dx, torch.inf)
            if ratio.shape[-1]:
                length = torch.minimum(length, part * ratio.amin(-1, keepdim=True))
        if not rows.even:
            reach = _REACH * (1 + 0.25 * path.u.abs()) / move.u.abs().clamp_min(TINY)
            length = torch.minimum(length, reach.amin(-1, keepdim=True))
        return length.clamp(max=1.0)


def _step(rows: Rows, path: Path, gap: Tensor, size: Tensor) -> Path:
    """Mehrotra's predictor and corrector, one factorisation."""
    system = _System(rows, path)
    low, high = path.up * path.below, path.down * path.above
    first = system.move(-low, -high)
    length = system.longest(first, 1.0)
    below, above, up, down = _slacks(path, first, length)
    ahead = path._replace(below=below, above=above, up=up, down=down)
    centring = (mean_gap(rows, ahead) / gap.clamp_min(TINY)).clamp(0, 1) ** 3
    centring = torch.where(length < 0.1, 1, centring)
    centring = torch.where(path.t < 1, centring.clamp_min(0.1), centring)
    goal, second = centring * gap, length * length
    move = system.move(
        goal - low - second * first.up * first.below,
        goal - high - second * first.down * first.above,
    )
    return _advance(rows, path, system, move, size)


def _slacks(path: Path, move: _Move, length: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slacks and multipliers after a step."""
    below, above = path.below + length * move.below, path.above + length * move.above
    return below, above, path.up + length * move.up, path.down + length * move.down


def _advance(rows: Rows, path: Path, system: _System, move: _Move, size: Tensor) -> Path:
    """As far along `move` as the linear prediction of C z is good."""
    length = system.longest(move, _NEARLY)
    Θ = system.Θ.masked_fill(rows.equal | system.free, 0)
    curve = (move.ν * (move.r + Θ * move.ν)).sum(-1, keepdim=True).abs()
    slop = 1e-12 * (move.ν.abs() * size).sum(-1, keepdim=True)
    t = path.t
    for _ in range(20):
        t = path.t + length * system.dt
        t = torch.where(t > 1 - 1e-12, 1, t)
        if rows.line:
            break
        z = rows.activation.sigma(t * rows.v + rows.adjoint(path.ν + length * move.ν))
        off = rows.apply(z) - path.r - length * move.r
        excess = (move.ν * off).sum(-1, keepdim=True).abs()
        rough = most_of(off.abs()) / most_of(rows.terms(z) + size)
        # While t moves, the slope would judge that: the error of the prediction is asked.
        steep = excess <= 0.7 * length * curve + slop
        good = torch.where(system.dt > 0, rough <= _LOOSE, steep)
        if bool(good.all()):
            break
        length = torch.where(good, length, 0.4 * length)
    below, above, up, down = _slacks(path, move, length)
    ν = torch.where(rows.equal, path.ν + length * move.ν, up - down)
    u = t * rows.v + rows.adjoint(ν)
    z = rows.activation.sigma(u)
    r = rows.apply(z)
    roomy = rows.has_lower & (r - rows.lower > below)
    below = torch.where(roomy, torch.minimum(r - rows.lower, 2 * below), below)
    roomy = rows.has_upper & (rows.upper - r > above)
    above = torch.where(roomy, torch.minimum(rows.upper - r, 2 * above), above)
    return Path(t, ν, below, above, up, down, u, z, r)

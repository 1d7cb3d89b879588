"""Newton, where it leaves samples open the interior point method, and Newton again to polish."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.backends import One, Rules
from taut.certificate import rays, reach_of_proof
from taut.outcome import Status
from taut.solvers.arc import Found, newton
from taut.solvers.interior import LOOKS, interior
from taut.solvers.sides import EPS, Point, Sides

_INNER, _POLISH, _LAST = 100, 20, 150  # steps of each part, at most
_ROUNDS = 3  # of the last part, where it is compiled
_ROOM = 2**22  # numbers of the matrices that proofs look at together
_FAR = 1e8  # a proof for |z| ≤ R decides from an R of so many times the numbers given


@final
class Chained(NamedTuple):
    """A verdict on every sample; multipliers of INFEASIBLE ones are the proof."""

    point: Point
    status: Int[Tensor, "N"]
    iterations: Int[Tensor, "N"]

    def write(self, index: Int[Tensor, "n"], part: "Chained") -> None:
        """Put `part`, which took its iterations besides, at `index`, in place."""
        self.point.write(index, part.point)
        self.status.index_copy_(0, index, part.status)
        self.iterations.index_add_(0, index, part.iterations)


def chain(sides: Sides, start: Float[Tensor, "N M"] | None, rules: Rules, exact: bool) -> Chained:
    """Solve every sample, or prove that it cannot be solved.

    Without `exact`, proofs are made of numbers that float32 has too.
    """
    one = One.of(sides.activation, sides.own_size == 0, sides.C, rules)
    found = newton(sides, start, rules, _within(rules, rules.first), one=one)
    work = _Work(sides, rules, exact, found, one)
    left = work.open()
    if len(left):
        left = left[~work.prove(left, work.found.point.multipliers[left].unsqueeze(1))]
    if len(left):
        left, _ = work.inner(left, 1e-8, LOOKS)
    if len(left):
        # More tight rows than outputs that have not saturated: Newton is singular on any active
        # set, the interior point method is not.
        left, end = work.inner(left, 1e-13, ())
        if len(left):
            work.last(left, None if start is None else start[left], end)
    return work.tidied()


def _size(sides: Sides) -> Float[Tensor, "n"]:
    """Of the numbers given."""
    size = sides.own_size + sides.v.abs().amax(-1)
    for x in (sides.lower, sides.upper):
        if x.shape[-1]:
            size = size + x.where(x.isfinite(), 0).abs().amax(-1)
    return size


def proven(
    ray: Float[Tensor, "n M"], sides: Sides, exact: bool
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n M"]]:
    """How far a proof goes, −1 where it decides nothing, and the proof to return.

    Without `exact` it is rounded to float32, and then goes as far as that lets it.
    """
    given = (sides.C, sides.lower, sides.upper, *sides.ends())
    size, reach = _size(sides), reach_of_proof(ray, *given)
    good = reach >= _FAR * size
    if not exact:
        ray = ray.float().double()
        reach = reach_of_proof(ray, *given)
        good = good & (reach >= size)
    return torch.where(good, reach, -1), ray


def _within(rules: Rules, steps: int) -> int:
    return min(steps, rules.max_iterations)


@final
class _Work:
    """What is known so far of every sample; written to in place."""

    def __init__(self, sides: Sides, rules: Rules, exact: bool, found: Found, one: One | None):
        self.sides, self.rules, self.exact, self.found = sides, rules, exact, found
        self.one = one
        self.iterations = found.iterations.clone()
        self.need = _FAR * _size(sides)

    def open(self) -> Int[Tensor, "n"]:
        return (self.found.status < 0).nonzero().squeeze(-1)

    def renew(self, index: Tensor, part: Found) -> None:
        """The samples at `index` as Newton left them now."""
        self.found.point.write(index, part.point)
        self.found.status.index_copy_(0, index, part.status)
        self.found.level.index_copy_(0, index, part.level)
        self.iterations.index_add_(0, index, part.iterations)

    def inner(
        self, index: Tensor, tol: float, looks: tuple[int, ...]
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n M"]]:
        """The interior point method to `tol`, then Newton.

        Returns the samples that are open still, and where the first of the two ended.
        """
        sides, proven = self.sides.take(index), torch.zeros_like(index, dtype=torch.bool)

        def watch(place: Tensor, tries: Tensor) -> Tensor:
            done = self.prove(index[place], tries)
            proven[place[done]] = True
            return done

        ended = interior(sides, tol, _within(self.rules, _INNER), watch, looks, self.one)
        self.iterations.index_add_(0, index, ended.iterations)
        rest = (~proven).nonzero().squeeze(-1)
        if len(rest):
            rest = rest[self._newton(index[rest], ended.start[rest], _POLISH)]
        if len(rest):
            ends = ended.raw[rest], self.found.point.multipliers[index[rest]]
            rest = rest[~self.prove(index[rest], torch.stack(ends, 1))]
        return index[rest], ended.start[rest]

    def last(self, index: Tensor, start: Tensor | None, end: Tensor) -> None:
        """Damped steps from the start; where they cost little, many, also from `end` and from 0."""
        several, left = self.one is not None, torch.arange(len(index)).to(index)
        starts = (start, end, None)[: 1 if not several else 2 if start is None else 3]
        ends = end.new_zeros(len(index), len(starts), end.shape[-1])
        for place, begin in enumerate(starts):
            ν = None if begin is None else begin[left]
            for _ in range(_ROUNDS if several else 1):
                left = left[self._newton(index[left], ν, _LAST)]
                if not len(left):
                    return
                ν = ends[left, place] = self.found.point.multipliers[index[left]]
        self.prove(index[left], ends[left], clear=False)

    def _newton(self, index: Tensor, start: Tensor | None, steps: int) -> Bool[Tensor, "n"]:
        """Damped steps; which of these samples they leave open."""
        steps = _within(self.rules, steps)
        part = newton(self.sides.take(index), start, self.rules, steps, True, self.one)
        self.renew(index, part)
        return part.status < 0

    def prove(
        self, index: Tensor, multipliers: Float[Tensor, "n tries M"], clear: bool = True
    ) -> Tensor:
        """Which of the samples at `index` are infeasible; writes the verdict and its proof.

        Where more may still be tried a proof must be `clear`: sides that disagree by rounding alone
        may have a solution to rounding.
        """
        n, tries, _ = multipliers.shape
        M, K = self.sides.C.shape
        best, proof = self.need.new_full((n,), -1.0), torch.zeros_like(multipliers[:, 0])
        for some in multipliers.split(max(1, _ROOM // (n * M * K)), 1):
            tries = some.shape[1]
            each = index.repeat_interleave(tries)
            found, told = self._proofs(each, some.flatten(0, 1), clear)
            reach, which = found.unflatten(0, (n, tries)).max(-1)
            told = told.unflatten(0, (n, tries)).take_along_dim(which[:, None, None], 1).squeeze(1)
            proof = torch.where((reach > best).unsqueeze(-1), told, proof)
            best = torch.maximum(reach, best)
        done = best > 0
        at = index[done]
        self.found.point.multipliers.index_copy_(0, at, proof[done])
        self.found.status.index_fill_(0, at, int(Status.INFEASIBLE))
        return done

    def _proofs(self, index: Tensor, multipliers: Tensor, clear: bool) -> tuple[Tensor, Tensor]:
        """How far the best proof goes that each ν leads to, −1 where there is none; and that."""
        sides, need = self.sides.take(index), self.need[index]
        best, proof = torch.full_like(need, -1.0), torch.zeros_like(multipliers)
        ends, lower, upper = sides.ends(), sides.lower, sides.upper
        if clear:  # by more than the rounding of sums of numbers like those given
            terms = sides.C.abs().apply(torch.ones_like(sides.v)) * need.unsqueeze(-1) / _FAR
            lower, upper = lower - 8 * EPS * terms, upper + 8 * EPS * terms
        for some in rays(multipliers, sides.C, *ends):
            rough = reach_of_proof(some, sides.C, lower, upper, *ends, safe=False)
            if sides.C.iterative and not bool((rough > 0).any()):
                break  # to refine it takes long, and there is nothing in it
            for ray, likely in zip(some, rough >= need, strict=True):
                few = likely.nonzero().squeeze(-1)
                if not len(few):
                    continue
                found, told = proven(ray[few], sides.take(few), self.exact)
                reach = torch.full_like(best, -1.0).index_copy(0, few, found)
                ray = ray.index_copy(0, few, told)
                proof = torch.where((reach > best).unsqueeze(-1), ray, proof)
                best = torch.maximum(reach, best)
            if bool((best > 0).all()):
                break
        return best, proof

    def tidied(self) -> Chained:
        """Multipliers that cannot be told from 0 are 0: their rows count as inactive.

        They move u by less than its rounding, and the conditions hold as well without them.
        """
        sides, point, status = self.sides, self.found.point, self.found.status
        status = status.where(status >= 0, int(Status.MAX_ITERATIONS))
        ν = point.multipliers
        if ν.shape[-1]:
            blur = sides.own_size + (sides.v.abs() + point.u.abs()).amax(-1, keepdim=True)
            idle = ν.abs() * sides.C.largest() <= self.rules.idle * blur
            idle = idle & (ν != 0) & ~sides.equal & (status == Status.CONVERGED).unsqueeze(-1)
            index = idle.any(-1).nonzero().squeeze(-1)
            if len(index):
                self._drop(index, idle[index])
        return Chained(point, status, self.iterations)

    def _drop(self, index: Tensor, idle: Tensor) -> None:
        """Set these multipliers to 0 where the conditions then hold as well."""
        sides, point = self.sides.take(index), self.found.point
        without = sides.point(point.multipliers[index].masked_fill(idle, 0))
        levels, *_ = sides.measure(without, sides.gradient(without.multipliers, without.r))
        fine = (levels.fair <= self.rules.fair) & (levels.rough <= self.rules.rough)
        fine = fine | (levels.plain <= self.found.level[index])
        few = fine.nonzero().squeeze(-1)
        point.write(index[few], sides.take(few).refined(without.take(few), self.rules.rough))

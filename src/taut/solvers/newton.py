"""Newton's method on D: the loop over iterations, and the verdict on each sample."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.analysis import pivoted, uneven
from taut.backends import Rules
from taut.outcome import Outcome, Status
from taut.problems import Inequalities, Linear, Nonlinear, Problem
from taut.solvers import base
from taut.solvers.anneal import anneal
from taut.solvers.around import held_outputs, portions, whole, without
from taut.solvers.base import Solver, Task, enter, leave, places
from taut.solvers.bounds import inequalities
from taut.solvers.cold import warmed
from taut.solvers.sequential import sequential
from taut.solvers.starts import first_state
from taut.solvers.step import Search, State, newton_step, worth_leaving_out
from taut.solvers.verdict import Verdicts, far, glance, judge, keeps
from taut.systems import solve_gram, wide

# What is not decided after so many iterations begins again: by annealing, if logits are large, or
# from 0, if a start was given.
_PATIENCE, _LARGE = 20, 10.0
# A residual that was not halved in so many iterations is enough, if z keeps the rule; or given up.
_TIRED, _STALLED = 30, 100


@final
@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method with a line search on the slope of D; the default.

    Each sample stops by itself when |A z − b| is within `tol` of |b| + |A||z|; None asks for the
    rounding level of v's dtype. Finished samples stand still, and are left out where that is
    cheaper.

    The solve runs in float64 whatever the dtype of v: that costs little, and a float32 z is then
    right to a few units in its last place. `dtype=None` solves in the dtype of v, for hardware that
    is slow in float64; with large logits a float32 u = v + Aᵀλ is itself too coarse for a small
    residual.

    >>> import taut
    >>> A, b = torch.ones(1, 3), torch.tensor([2.0])
    >>> taut.project(torch.zeros(3), A, b, activation="sigmoid", solver=Newton(tol=1e-6)).z
    tensor([0.6667, 0.6667, 0.6667])
    """

    tol: float | None = None
    max_iterations: int = 200
    dtype: torch.dtype | None = torch.float64

    def __post_init__(self) -> None:
        if self.tol is not None and not self.tol > 0:
            raise ValueError(f"tol must be positive or None; got {self.tol!r}.")
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations must be ≥ 0; got {self.max_iterations!r}.")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32, float64 or None; got {self.dtype!r}.")

    @cached_property
    def rules(self) -> Rules:
        """Every threshold of the method."""
        return Rules(self.tol, self.max_iterations, self.dtype)

    def solve(self, problem: Problem) -> Outcome:
        outcome = problem.prepared.backend.attempt(problem, self.rules)
        return _finished(problem, outcome, self.rules) if outcome.failed else outcome


def _finished(problem: Problem, outcome: Outcome, rules: Rules) -> Outcome:
    """What the backend has left open, by torch."""
    method = _METHODS[type(problem)]
    if outcome.failed == len(outcome.status):
        return method(problem, rules)
    left = outcome.left()
    return outcome.write(left, method(problem.take(left), rules))


def equations(problem: Linear, rules: Rules) -> Outcome:
    """Newton's method in torch: a verdict on every sample."""
    outcome = _equations(problem, rules)
    return _nearest(problem, rules, outcome) if outcome.failed else outcome


def _nearest(problem: Linear, rules: Rules, outcome: Outcome) -> Outcome:
    """Give samples that are INCONSISTENT the z of the nearest b that is not."""
    apart = (outcome.status == Status.INCONSISTENT).nonzero().squeeze(-1)
    if not len(apart):
        return outcome
    few, dtype, own = problem.take(apart), wide(problem.v), problem.v.dtype
    basis = few.prepared.basis_in(dtype)
    if basis.left_out is None:
        return outcome
    v, data, b = (x.to(dtype) for x in (few.v, few.data, few.b))
    A, near = few.prepared.map.over(data), basis.restrict(basis.project(b))
    s = solve_gram(basis.map, torch.ones_like(v), near, basis.left_out)
    # A x and not `near`, which is no A z in rows that are small beside others, or 0.
    near = A.apply(basis.map.adjoint(s))
    found = _equations(replace(few, v=v, data=data, b=near, start=None), rules)
    z, solved = found.z.to(own), (found.status == Status.CONVERGED).nonzero().squeeze(-1)
    found = replace(
        found,
        z=z,
        multipliers=basis.least(found.multipliers).to(own),
        u=found.u.to(own),
        residual=few.residual(z).abs().amax(-1),
        iterations=found.iterations + outcome.iterations[apart],
        status=torch.full_like(found.status, int(Status.INCONSISTENT)),
        failed=outcome.failed,
    )
    return outcome.write(apart[solved], found.take(solved))


def _equations(problem: Linear, rules: Rules) -> Outcome:
    found = held_outputs(problem, problem.b, problem.b)
    if found is None:
        return _plainly(problem, rules)
    outcome = Outcome.open(problem.v, problem.b.shape[-1])
    for part in portions(problem, found):
        task, start = without(problem, part, rules)
        solved = _by_basis(task, rules, problem.v.dtype, start)
        samples, decided = whole(problem, part, rules, task, solved)
        index = decided.nonzero().squeeze(-1)
        outcome = outcome.write(part.index[index], samples.take(index))
    left = outcome.left()
    outcome = outcome.write(left, _plainly(problem.take(left), rules))
    return replace(outcome, failed=int((outcome.status != Status.CONVERGED).sum()))


def _plainly(problem: Linear, rules: Rules) -> Outcome:
    dtype = problem.v.dtype
    task, start, finite = enter(problem, rules.dtype or dtype)
    if len(start) == 0:
        return Outcome.open(problem.v, start.shape[-1])
    return leave(problem, task, finite, _by_basis(task, rules, dtype, start))


def _inequalities(problem: Inequalities, rules: Rules) -> Outcome:
    def alone(problem: Linear, steps: int) -> Outcome:
        outcome = problem.prepared.backend.attempt(problem, rules)
        fewer = replace(rules, max_iterations=steps)
        return _finished(problem, outcome, fewer) if outcome.failed else outcome

    return inequalities(problem, rules, alone)


def _nonlinear(problem: Nonlinear, rules: Rules) -> Outcome:
    return sequential(problem, rules, Newton().solve)


_METHODS: dict[type[Problem], Any] = {
    Linear: equations,
    Inequalities: _inequalities,
    Nonlinear: _nonlinear,
}


def _by_basis(
    task: Task, rules: Rules, dtype: torch.dtype, start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_iterate`, in a basis of their own for samples that leave out other equations."""
    apart = uneven(task.basis, task.b)
    if apart is None:
        return _iterate(Search.of(task, rules, dtype), start)
    index, rest = apart.nonzero().squeeze(-1), (~apart).nonzero().squeeze(-1)
    own = task.take(index)
    own = replace(own, basis=pivoted(own.basis, own.A, own.b))
    found = _iterate(Search.of(own, rules, dtype), start[index])
    if not len(rest):
        return found
    others = _iterate(Search.of(task.take(rest), rules, dtype), start[rest])
    back = torch.cat([rest, index]).argsort()
    return tuple(torch.cat(pair)[back] for pair in zip(others, found, strict=True))  # pyright: ignore


def _iterate(search: Search, start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """λ, u, z, iterations and status of every sample."""
    task, state, known = search.task, first_state(search, start), None
    if base.on_host(state.u):
        state, known = warmed(search, state)
    progress, found = _Progress.start(state), _Found.start(state)
    open = len(state.u)
    if known is not None:
        index = (known.status >= 0).nonzero().squeeze(-1)
        found, open = found.after(progress.place, index, state, known, 0), open - len(index)
        progress = progress._replace(open=known.status < 0)
    for iteration in range(search.rules.max_iterations + 1):
        stalls = progress.stalled(state)
        verdicts, fresh, count = _judged(search, state, progress, stalls, iteration)
        if count:
            found = found.after(progress.place, places(fresh, count), state, verdicts, iteration)
        progress, open = progress.after(state, fresh, stalls), open - count
        if open == 0:
            break
        if worth_leaving_out(open, state):
            left = places(progress.open, open)
            search, state, progress = search.take(left), state.take(left), progress.take(left)
        if iteration == _PATIENCE:
            state, progress = _annealed(search, state, progress)
            state, progress = _from_zero(search, state, progress, start)
        closed = None if open == len(state.u) else ~progress.open
        state = newton_step(search, state, closed)
    multipliers = task.basis.leave(found.multipliers)
    if task.basis.left_out is not None:
        eps = torch.finfo(task.v.dtype).eps
        multipliers = task.basis.smallest(task.A, task.v, multipliers, eps)
    if found.proofs is not None:
        proven = (found.status == Status.INFEASIBLE).unsqueeze(-1)
        multipliers = torch.where(proven, found.proofs, multipliers)
    return multipliers, found.u, found.z, found.iterations, found.status


def _judged(
    search: Search, state: State, progress: "_Progress", stalls: Tensor, iteration: int
) -> tuple[Verdicts, Bool[Tensor, "n"], int]:
    """The verdicts, which of them are fresh, and how many those are; on a device by one look."""

    def counted(verdicts: Verdicts) -> tuple[Verdicts, Tensor, Tensor]:
        tired = progress.idle >= _TIRED
        if not base.on_host(tired) or bool(tired.any()):
            meets = tired & keeps(search, state.z, state.residual)
            verdicts = verdicts.ended(meets, Status.CONVERGED)
            verdicts = verdicts.ended(progress.idle >= _STALLED, Status.MAX_ITERATIONS)
        if iteration == search.rules.max_iterations:
            verdicts = verdicts.ended(progress.open, Status.MAX_ITERATIONS)
        fresh = progress.open & (verdicts.status >= 0)
        return verdicts, fresh, fresh.sum()

    now = search, state, progress.open, stalls, iteration
    if not base.on_host(state.u) and search.task.basis.left_out is None:
        if iteration == 0 < search.rules.max_iterations and any(base.look(far(search, state))):
            return Verdicts(torch.full_like(stalls, -1)), torch.zeros_like(progress.open), 0
        verdicts, more = glance(*now)
        verdicts, fresh, count = counted(verdicts)
        more, count = base.look(more, count)
        if not more:
            return verdicts, fresh, count
    verdicts, fresh, count = counted(judge(*now))
    return verdicts, fresh, int(count)


def _annealed(search: Search, state: State, progress: "_Progress") -> tuple[State, "_Progress"]:
    """With another start for the samples that are still open, if their logits are large."""
    large = search.reach(search.task.v) > _LARGE
    index = (progress.open & large).nonzero().squeeze(-1)
    if len(index) == 0:
        return state, progress
    part, done = anneal(search.take(index), state.take(index))
    state.write(index, part)
    return state, progress.anew(index[done])


def _from_zero(
    search: Search, state: State, progress: "_Progress", start: Tensor
) -> tuple[State, "_Progress"]:
    """The samples that are still open, from λ = 0: their start has led nowhere.

    Far out all activations have saturated, and a step moves u by next to nothing.
    """
    large = search.reach(search.task.v) > _LARGE
    given = (start[progress.place] != 0).any(-1)
    index = (progress.open & given & ~large).nonzero().squeeze(-1)
    if len(index) == 0:
        return state, progress
    part = search.take(index)
    state.write(index, first_state(part, torch.zeros_like(state.multipliers[index])))
    return state, progress.anew(index)


@final
class _Found(NamedTuple):
    """Every sample as it was when its verdict fell: computed again it may round differently."""

    multipliers: Float[Tensor, "N I"]  # of the basis
    u: Float[Tensor, "N K"]
    z: Float[Tensor, "N K"]
    iterations: Int[Tensor, "N"]
    status: Int[Tensor, "N"]
    proofs: Float[Tensor, "N I"] | None  # certificates of the infeasible ones

    @staticmethod
    def start(state: State) -> "_Found":
        zero = torch.zeros(len(state.u), dtype=torch.long, device=state.u.device)
        multipliers, u, z = (torch.empty_like(x) for x in state[:3])
        return _Found(multipliers, u, z, zero, zero - 1, None)

    def after(
        self,
        place: Int[Tensor, "n"],
        index: Int[Tensor, "m"],
        state: State,
        verdicts: Verdicts,
        iteration: int,
    ) -> "_Found":
        """With the samples at `index`, of those at `place`, on which there is a fresh verdict."""
        status, proofs, settled = verdicts
        if settled is not None:
            state.write(*settled)
        place = place[index]
        found = state.multipliers, state.u, state.z, status
        if len(index) < len(self.u):
            pairs = zip((self.multipliers, self.u, self.z, self.status), found, strict=True)
            found = tuple(x.index_copy_(0, place, y[index]) for x, y in pairs)
        multipliers, u, z, status = found
        iterations = self.iterations.index_fill(0, place, iteration)
        kept = self.proofs
        if proofs is not None:
            kept = torch.zeros_like(multipliers) if kept is None else kept
            kept = kept.index_copy(0, place, proofs[index])
        return _Found(multipliers, u, z, iterations, status, kept)


@final
class _Progress(NamedTuple):
    """How the samples being worked on have come along."""

    place: Int[Tensor, "n"]  # in the batch
    open: Bool[Tensor, "n"]
    best: Float[Tensor, "n"]  # the smallest `relative` so far
    stalls: Int[Tensor, "n"]  # for how many iterations it has not been halved
    least: Float[Tensor, "n"]  # the smallest |A z − b| so far
    idle: Int[Tensor, "n"]  # for how many iterations neither has been halved

    @staticmethod
    def start(state: State) -> "_Progress":
        place = torch.arange(len(state.u), device=state.u.device)
        best = torch.full_like(state.relative, torch.inf)
        zero = torch.zeros_like(place)
        return _Progress(place, place >= 0, best, zero, best, zero)

    def after(self, state: State, fresh: Bool[Tensor, "n"], stalls: Tensor) -> "_Progress":
        """With this state and its verdicts."""
        best = torch.minimum(self.best, state.relative)
        # exp on its way down to a small b: the residual falls, and its scale with it.
        size = state.residual.abs().amax(-1) if state.residual.shape[-1] else state.relative
        idle = (self.idle + 1).masked_fill_((size < 0.5 * self.least) | (stalls == 0), 0)
        least = torch.minimum(self.least, size)
        return _Progress(self.place, self.open & ~fresh, best, stalls, least, idle)

    def anew(self, index: Int[Tensor, "m"]) -> "_Progress":
        """Without what the samples at `index` have come to: they begin again."""
        best, least = (x.index_fill(0, index, torch.inf) for x in (self.best, self.least))
        stalls, idle = (x.index_fill(0, index, 0) for x in (self.stalls, self.idle))
        return self._replace(best=best, stalls=stalls, least=least, idle=idle)

    def stalled(self, state: State) -> Int[Tensor, "n"]:
        """`stalls` with this state in it."""
        return (self.stalls + 1).masked_fill_(state.relative < 0.5 * self.best, 0)

    def take(self, index: Tensor) -> "_Progress":
        return _Progress(*(x[index] for x in self))

"""Newton's method on D, for each sample alone."""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.certificate import certifies
from taut.dual import Dual
from taut.factor import Factor, factorise, solve_gram
from taut.rows import Rows
from taut.solution import Status
from taut.solver import Outcome, Solver, relative, rounding_scale
from taut.sparse import SparseMap


@final
class _State(NamedTuple):
    """The samples still being worked on; `place` is where they are in the batch."""

    place: Int[Tensor, "n"]
    multipliers: Float[Tensor, "n I"]  # of the basis Q = T A
    u: Float[Tensor, "n K"]
    z: Float[Tensor, "n K"]
    residual: Float[Tensor, "n I"]  # A z − b
    relative: Float[Tensor, "n"]  # its size over |b| + |A||z|
    best: Float[Tensor, "n"]  # the smallest of these before
    stalls: Int[Tensor, "n"]  # for how many iterations it has not been halved

    def history(self) -> tuple[Tensor, Tensor]:
        """`best` and `stalls` with this state in them."""
        stalls = (self.stalls + 1).masked_fill_(self.relative < 0.5 * self.best, 0)
        return torch.minimum(self.best, self.relative), stalls

    def rows(self, index: Tensor) -> "_State":
        return _State(*(x.index_select(0, index) for x in self))

    def write(self, index: Tensor, other: "_State") -> None:
        """Put the samples of `other` at `index`, in place."""
        for mine, theirs in zip(self, other, strict=True):
            mine.index_copy_(0, index, theirs)


@final
class _Problem(NamedTuple):
    """D in the coordinates of the basis: u = v + Qᵀλ, ∇ = T(A z − b), ∇² = Q diag(w) Qᵀ."""

    dual: Dual
    rows: Rows
    size_of_b: Tensor

    def state(self, place: Tensor, multipliers: Tensor, best: Tensor, stalls: Tensor) -> _State:
        u = self.rows.basis.adjoint(multipliers).add_(self.dual.v)
        z = self.dual.activation.sigma(u)
        residual = self.dual.A.apply(z).sub_(self.dual.b)
        size = z if self.dual.activation.range.positive else z.abs()
        scale = self.dual.A.abs().apply(size).add_(self.size_of_b)
        return _State(
            place, multipliers, u, z, residual, relative(residual, scale), best, stalls
        )

    def slopes(self, u: Tensor) -> Tensor:
        return self.dual.activation.slope(u)

    def direction(self, w: Tensor, residual: Tensor) -> Tensor:
        """−(Q diag(w) Qᵀ)⁻¹∇D: Newton's where w are the slopes."""
        return -solve_gram(self.rows.basis, w, self.rows.restrict(residual), self.rows.left_out)

    @property
    def iterative(self) -> bool:
        """Is the Hessian too large to be formed?"""
        return isinstance(self.rows.basis, SparseMap) and self.rows.basis.iterative

    def take(self, index: Tensor) -> "_Problem":
        return _Problem(self.dual.rows(index), self.rows.rows(index), self.size_of_b[index])


@final
@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method with a line search on the slope of D; the default.

    Each sample stops by itself when |A z − b| is within `tol` of |b| + |A||z|; None asks for the
    rounding level of v's dtype. Finished samples cost nothing more.

    The solve runs in float64 whatever the dtype of v: that costs little, and a float32 z is then
    the rounding of the right one. `dtype=None` solves in the dtype of v, for hardware that is slow
    in float64; with large logits a float32 u = v + Aᵀλ is itself too coarse for a small residual.

    A step p is judged by the derivative of D along it, h(α) = pᵀ∇D(λ + αp), which rises from
    −|h(0)|: it is too long when h has become clearly positive. Differences of D itself, as in
    Armijo's rule, drown in rounding long before the residual does.

    >>> import taut
    >>> A, b = torch.ones(1, 3), torch.tensor([2.0])
    >>> taut.project(torch.zeros(3), A, b, activation="sigmoid", solver=Newton(tol=1e-6)).z
    tensor([0.6667, 0.6667, 0.6667])
    """

    tol: float | None = None
    max_iterations: int = 200
    dtype: torch.dtype | None = torch.float64

    # u moves at most this far in the first trial of a line search: σ is another function there.
    _reach = 5.0
    # Steps with one factor, as long as each gains a digit: they cost a fraction of a new one.
    _chords = 5
    # The loosest level at which a residual that has stopped falling counts as rounding.
    _floor = 1e-13

    def __post_init__(self) -> None:
        if self.tol is not None and not self.tol > 0:
            raise ValueError(f"tol must be positive or None; got {self.tol!r}.")
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations must be ≥ 0; got {self.max_iterations!r}.")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32, float64 or None; got {self.dtype!r}.")

    def solve(
        self, dual: Dual, rows: Rows, init: Float[Tensor, "N I"], group_size: int, eps: float
    ) -> Outcome:
        if len(init) == 0:
            return Outcome.like(dual, init)
        problem = _Problem(dual, rows, _size_of_b(dual))
        state = self._start(problem, init)
        outcome = None
        for iteration in range(self.max_iterations + 1):
            status, multipliers = self._judge(problem, state, iteration, eps)
            if iteration == self.max_iterations:
                status = status.where(status >= 0, int(Status.MAX_ITERATIONS))
            left = (status < 0).nonzero().squeeze(-1)
            if len(left) < len(status):
                count = torch.full_like(status, iteration)
                here = Outcome(multipliers, state.u, state.z, count, status)
                if outcome is None:
                    outcome = here  # samples that are left will be written over
                else:
                    done = (status >= 0).nonzero().squeeze(-1)
                    outcome.write(state.place[done], here.rows(done))
                if len(left) == 0:
                    return outcome
                problem, state = problem.take(left), state.rows(left)
            state = self._step(problem, state, eps)
        raise AssertionError("unreachable: the last iteration decides every sample")

    def _start(self, problem: _Problem, init: Tensor) -> _State:
        place = torch.arange(len(init), device=init.device)
        best = init.new_full((len(init),), torch.inf)
        # States are written to: `init` itself must not be part of one.
        multipliers = problem.rows.enter(problem.dual.A, init).clone()
        state = problem.state(place, multipliers, best, torch.zeros_like(place))
        if problem.dual.activation.range.bounded:
            return state
        lost = ~(state.residual.abs() <= 1e4 * (1 + problem.size_of_b)).all(-1)
        if bool(lost.any()):
            lost = lost.nonzero().squeeze(-1)
            state.write(lost, self._lower(problem.take(lost), state.rows(lost)))
        return state

    def _lower(self, problem: _Problem, state: _State) -> _State:
        """A better start where exp begins far too high, if there is one.

        Only the part of v in the null space of A matters, so the rest can be taken out; and then
        u can move down as one: v → v − Aᵀ(AAᵀ)⁻¹A(v + s·1), first with s = 0, then s = max u.
        """
        shift, v = torch.zeros_like(state.u[:, :1]), problem.dual.v
        for _ in range(2):
            multipliers = problem.direction(torch.ones_like(v), problem.dual.A.apply(v + shift))
            trial = problem.state(state.place, multipliers, state.best, state.stalls)
            shift = trial.u.amax(-1, keepdim=True)
            size, before = (x.residual.abs().amax(-1).nan_to_num(torch.inf) for x in (trial, state))
            better = (size < before).nonzero().squeeze(-1)
            state.write(better, trial.rows(better))
        return state

    def _target(self, state: _State, eps: float) -> float:
        return self.tol or max(2 * eps, 8 * torch.finfo(state.z.dtype).eps)

    def _judge(
        self, problem: _Problem, state: _State, iteration: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        """A Status for each sample, or −1 where the work goes on; and its multipliers."""
        target, own = self._target(state, eps), 8 * torch.finfo(state.z.dtype).eps
        floor = max(4 * own, self._floor)
        raw = problem.rows.leave(state.multipliers)
        multipliers = problem.rows.project(raw)
        smallest, largest = (x.item() for x in state.relative.aminmax())
        if largest <= target:
            return torch.zeros_like(state.place), multipliers
        if iteration == 0 and smallest > max(target, 1e3 * own) and largest < torch.inf:
            return torch.full_like(state.place, -1), multipliers
        converged = state.relative <= target
        near = state.relative <= torch.where(state.stalls > 0, min(1e6 * floor, 1e-2), 1e3 * own)
        if bool(near.any()):
            # Is what is left the rounding of u, or has it stopped falling?
            level = relative(state.residual, rounding_scale(problem.dual, state.u, state.z))
            stalls = state.history()[1]
            stuck = ((level <= 4 * own) & (stalls > 0)) | ((level <= floor) & (stalls > 2))
            converged = converged | (near & ((level <= own) | stuck))
        status = (~converged).long().neg_()  # CONVERGED is 0
        if problem.rows.left_out is not None:
            status = self._redundant(problem, state, status, eps)
        elif iteration > 1 and bool(problem.rows.condition.isnan().any()):
            status = status.where(
                converged | ~_contradicts(problem, state), int(Status.INCONSISTENT)
            )
        if iteration > 1:
            proven, proofs = _certificates(problem, raw, eps)
            proven = proven & (status < 0)
            status = status.where(~proven, int(Status.INFEASIBLE))
            multipliers = torch.where(proven.unsqueeze(-1), proofs, multipliers)
        return status.where(state.relative < torch.inf, int(Status.NONFINITE)), multipliers

    def _redundant(self, problem: _Problem, state: _State, status: Tensor, eps: float) -> Tensor:
        """The verdicts on samples with rows that others imply: do their b agree?"""
        left_out = torch.as_tensor(problem.rows.left_out, device=state.u.device)
        b, gap = problem.dual.b, problem.dual.b - problem.rows.project(problem.dual.b)
        contradictory = (gap.abs() > eps**0.5 * b.abs().amax(-1, keepdim=True)).any(-1)
        scale = rounding_scale(problem.dual, state.u, state.z)
        kept = relative(state.residual.masked_fill(left_out, 0), scale)
        solved = (kept <= 8 * torch.finfo(scale.dtype).eps) & left_out.any(-1) & (status < 0)
        # Of numbers given to eps, more than that cannot be asked of the rows left out.
        alike = relative(state.residual, scale) <= max(16 * eps, self._floor)
        status = status.where(~(solved & alike), int(Status.CONVERGED))
        contradictory = (status < 0) & (contradictory | solved)
        return status.where(~contradictory, int(Status.INCONSISTENT))

    def _step(self, problem: _Problem, state: _State, eps: float) -> _State:
        w = problem.slopes(state.u)
        if problem.iterative:
            factor, step = None, problem.direction(w, state.residual)
        else:
            factor = factorise(problem.rows.basis, w, problem.rows.left_out)
            step = factor.solve(problem.rows.restrict(state.residual)).neg_()
        result = problem.state(state.place, state.multipliers + step, *state.history())
        reach = (result.u - state.u).abs_().amax(-1)
        # Most steps are plainly good: near, and with a residual that has fallen by a lot.
        good = (result.relative <= 0.25 * state.relative) & (reach <= self._reach)
        bad = (~good).nonzero().squeeze(-1)
        if len(bad):
            part, before = problem.take(bad), state.rows(bad)
            step = self._tame(part, before, step[bad], reach[bad])
            result.write(bad, self._search(part, before, step))
        if factor is not None:
            target = self._target(state, eps)
            result = self._repeat(problem, factor, result, good, target, self._chords)
        return result

    def _repeat(
        self,
        problem: _Problem,
        factor: Factor,
        state: _State,
        which: Tensor,
        target: float,
        times: int,
    ) -> _State:
        """More steps with the same factor while each gains a digit."""
        index = (which & (state.relative > target)).nonzero().squeeze(-1)
        if times == 0 or len(index) == 0:
            return state
        before, whole = state, len(index) == len(which)
        if not whole:
            problem, factor, before = problem.take(index), factor.rows(index), state.rows(index)
        step = factor.solve(problem.rows.restrict(before.residual))
        after = problem.state(before.place, before.multipliers - step, before.best, before.stalls)
        worse = (~(after.relative < before.relative)).nonzero().squeeze(-1)
        if len(worse):
            after.write(worse, before.rows(worse))
        gains = after.relative < 0.1 * before.relative
        after = self._repeat(problem, factor, after, gains, target, times - 1)
        if whole:
            return after
        state.write(index, after)
        return state

    def _tame(self, problem: _Problem, state: _State, step: Tensor, reach: Tensor) -> Tensor:
        """The steps, with those that run away replaced."""
        wild = (~(reach <= 20 * self._reach)).nonzero().squeeze(-1)
        if len(wild) == 0:
            return step
        return step.index_copy(0, wild, self._damped(problem.take(wild), state.rows(wild)))

    def _damped(self, problem: _Problem, state: _State) -> Tensor:
        """The direction where Newton's is hopeless: some combination of rows has saturated.

        Such a combination would run away and hold all others back. Slopes w + μ limit it, with μ
        so that a step against no curvature at all moves u by about 200.
        """
        flat = problem.direction(torch.ones_like(state.u), state.residual)
        mu = problem.rows.basis.adjoint(flat).abs().amax(-1, keepdim=True) / 200
        return problem.direction(problem.slopes(state.u) + mu, state.residual)

    def _search(self, problem: _Problem, state: _State, step: Tensor) -> _State:
        """The state at λ + αp, with α chosen for each sample from the size and sign of h(α)."""
        best, stalls = state.history()
        steepness = (step * problem.rows.restrict(state.residual)).sum(-1).abs()
        reach = problem.rows.basis.adjoint(step).abs().amax(-1)
        alpha = (self._reach / reach).nan_to_num(0.0).clamp(max=1)
        growing, low = torch.ones_like(alpha, dtype=torch.bool), torch.zeros_like(alpha)
        todo = torch.arange(len(step), device=step.device)
        result = state.rows(todo)
        for _ in range(40):
            part, h0, a, floor = problem.take(todo), steepness[todo], alpha[todo], low[todo]
            moved = state.multipliers[todo] + a.unsqueeze(-1) * step[todo]
            trial = part.state(state.place[todo], moved, best[todo], stalls[todo])
            result.write(todo, trial)
            h = (step[todo] * part.rows.restrict(trial.residual)).sum(-1)
            long = ~(h <= 0.5 * h0)
            # D still falls at a good part of its first rate: go further. exp needs it, whose
            # Newton step is one unit of u however far there is to go.
            short = (h < -0.3 * h0) & growing[todo]
            cut = (h0 / (h0 + h)).nan_to_num(nan=0.1).clamp(0.1, 0.5)
            further = torch.where(short, 4 * a, a)
            alpha[todo] = torch.where(long, floor + (a - floor) * cut, further)
            low[todo] = torch.where(short, a, floor)
            growing[todo] = short & (a < 16)
            todo = todo[long | short]
            if len(todo) == 0:
                break
        return result


def _size_of_b(dual: Dual) -> Tensor:
    """|b|; for an entry that is 0, what the others let one expect of its row."""
    size = dual.b.abs()
    if size.numel() == 0 or size.amin().item() > 0:
        return size
    # With exp, Σz = 0 is reached only by z → 0: without a size of its own to compare with, no
    # residual would ever be small.
    row = dual.A.abs().apply(torch.ones_like(dual.v))
    natural = torch.where(row > 0, size / row, torch.zeros_like(size)).amax(-1, keepdim=True)
    start = dual.activation.sigma(dual.v).abs().amax(-1, keepdim=True).clamp(max=1)
    expected = (row * torch.where(natural == 0, start, natural)).clamp(max=1)
    return torch.where(size == 0, expected, size)


def _contradicts(problem: _Problem, state: _State) -> Tensor:
    """Is the residual r orthogonal to the range of A? Then rᵀ(A z − b) = −rᵀb for every z."""
    A = problem.dual.A
    image, size = A.adjoint(state.residual).abs(), A.abs().adjoint(state.residual.abs())
    return (image <= 1e-8 * size).all(-1)


def _certificates(problem: _Problem, multipliers: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Which samples are proven infeasible, and by which multipliers."""
    dual = problem.dual
    # As far as λ has run, only its direction counts: bring it to size 1 by a power of 2, and to
    # the precision in which it will be returned.
    size = multipliers.abs().amax(-1, keepdim=True)
    candidate = torch.ldexp(multipliers, -torch.frexp(size.nan_to_num(1.0)).exponent)
    candidate = candidate.to(torch.float32).to(size.dtype) if eps > 1e-10 else candidate
    proven = certifies(candidate, dual.A.adjoint(candidate), dual)
    if not dual.activation.range.bounded:
        # λ = t·d + rest with t → ∞, and in a half-infinite range the rest may spoil the proof
        # that d is: leave out the small entries.
        direction = candidate.where(candidate.abs() > 0.1, 0)
        also = ~proven & certifies(direction, dual.A.adjoint(direction), dual)
        candidate = torch.where(also.unsqueeze(-1), direction, candidate)
        proven = proven | also
    return proven, candidate

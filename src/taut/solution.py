"""What `project` returns. Batch dimensions begin again here."""

from operator import attrgetter
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.autograd import exporting
from taut.certificate import reach_of_proof
from taut.outcome import Outcome, Status, explain, tally
from taut.problems import Problem
from taut.remarks import at_ends, remarks

_VERSION = attrgetter("_version")
_FOUND = ("z", "multipliers", "u", "residual", "status")
_found = attrgetter(*_FOUND)


@final
class Solution:
    """The result of `taut.project`: everything is measured at this very z.

    It is a record: what is written to v, A, b or another input later does not change it. Where it
    was written to itself, with an in-place operation, what can no longer be answered raises.

    `z`, `multipliers` and `u` carry gradients to v, A and b. `residual` is max_i |A z − b|_i.

    >>> import taut
    >>> v, A, b = torch.zeros(3), torch.ones(1, 3), torch.tensor([1.0])
    >>> solution = taut.project(v, A, b, activation="exp")
    >>> solution.z, solution.converged
    (tensor([0.3333, 0.3333, 0.3333]), tensor(True))
    """

    z: Float[Tensor, "*batch K"]
    """The output: σ(u), with A z = b."""
    multipliers: Float[Tensor, "*batch I"]
    """λ, one for each equation, then those of G: > 0 at its lower side, < 0 at its upper one, 0
    where it is inactive. Of an INFEASIBLE sample, the certificate."""
    u: Float[Tensor, "*batch K"]
    """v + Aᵀλ."""
    residual: Float[Tensor, "*batch"]
    """The largest |A z − b| or violation of the sample."""
    iterations: Int[Tensor, "*batch"]
    """How many the solver took."""
    status: Int[Tensor, "*batch"]
    """A `Status` for each sample, as an integer."""
    _problem: Problem
    _outcome: Outcome
    _versions: tuple[Any, ...]  # of the inputs and of what was found, when they were solved
    _record: Problem | None  # copies of the inputs: what is said of samples that fail is made of it
    _condition: Tensor | None  # of a solution from a file, whose A is looked at again there

    def __init__(self, problem: Problem, outcome: Outcome, batch: torch.Size) -> None:
        z, multipliers, u = outcome.z, outcome.multipliers, outcome.u
        residual, iterations, status = outcome.residual, outcome.iterations, outcome.status
        if len(batch) != 1:
            z, multipliers, u = (x.reshape(*batch, x.shape[-1]) for x in (z, multipliers, u))
            residual, iterations, status = (
                x.reshape(batch) for x in (residual, iterations, status)
            )
        compiling, counted, record = torch.compiler.is_compiling(), (), None
        if compiling:  # there are no counters here; copies that nobody reads leave the graph
            if not exporting():
                record, outcome = problem.copied(), outcome.copied()
        else:
            record = problem.copied() if outcome.failed else None
            tensors = *problem.inputs, *_found(outcome)
            try:  # here, as this is on the way of every call
                counted = tuple(map(_VERSION, tensors))
            except RuntimeError:
                counted = versions(tensors)
        fields = dict(
            z=z,
            multipliers=multipliers,
            u=u,
            residual=residual,
            iterations=iterations,
            status=status,
            _problem=problem,
            _outcome=outcome,
            _versions=counted,
            _record=record,
            _condition=None,
        )
        if compiling:  # not all that can follow this know __dict__
            for name, value in fields.items():
                object.__setattr__(self, name, value)
        else:
            self.__dict__.update(fields)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return _refuse()

    def __getattr__(self, name: str) -> Any:
        hint = ""
        if hasattr(Tensor, name) and not name.startswith("_"):
            hint = f" It is not a tensor: use solution.z.{name}, or that of another of its tensors."
        raise AttributeError(f"a Solution has no {name!r}.{hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Solution is what was found: {name} cannot be set.")

    @property
    def converged(self) -> Bool[Tensor, "*batch"]:
        """Which samples satisfy A z = b to tolerance."""
        return self.status == Status.CONVERGED

    @property
    def active(self) -> Int[Tensor, "*batch _"]:
        """For each row of G, or each bound on z: 1 at its lower, −1 at its upper side, else 0."""
        check_unwritten(self, "`active`", ("z", "multipliers", "u"))
        outcome = self._outcome
        found = self._problem.active(outcome.multipliers, outcome.u, outcome.z)
        return found.reshape(*self.status.shape, found.shape[-1])

    @property
    def radius(self) -> Float[Tensor, "*batch"]:
        """How far the proof of an INFEASIBLE sample goes: no z with |z| ≤ radius will do.

        It is inf for a full proof, and NaN where there is none. Outputs that v = ±inf, or a y at an
        end of the range, holds there stand still in the proof.
        """
        if self._outcome.failed == 0:
            return torch.full_like(self.residual, torch.nan)
        problem = self._record or self._problem
        check_unwritten(self, "`radius`", ("multipliers", "status"))
        with torch.no_grad():
            C, *others = problem.sides
            infeasible = self._outcome.status == Status.INFEASIBLE
            lower, upper, *ends = (x.detach().double() for x in others)
            least, most = at_ends(problem, *ends)
            ν = self._outcome.multipliers.detach().double()
            C = C.over(C.data.detach().double())
            found = reach_of_proof(ν, C, lower, upper, least, most)
            found = _rounded_down(found.where(infeasible & (found > 0), torch.nan), self.z.dtype)
        return found.reshape(self.status.shape)

    @property
    def condition(self) -> Float[Tensor, "*batch"]:
        """The condition number of A's rows, scaled to length 1, as estimated.

        NaN for a sparse A of more than 2,048 rows. Rounding moves z by about `condition`·eps, the
        multipliers by up to `condition`²·eps.
        """
        if self._condition is not None:
            return self._condition
        condition = self._problem.prepared.basis_in(torch.float64).condition.to(self.z.dtype)
        return condition.expand(self.status.numel()).reshape(self.status.shape)

    def report(self) -> str:
        """In words: how many samples failed, which ones first, why, and what to try.

        >>> import taut
        >>> v, A, b = torch.zeros(2, 3), torch.ones(1, 3), torch.tensor([[1.0], [4.0]])
        >>> solution = taut.project(v, A, b, activation="sigmoid", on_failure="return")
        >>> print(solution.report()[:50])
        1 of 2 samples could not be projected on A z = b.
        """
        check_unwritten(self, "the report", ("multipliers", "residual", "status"))
        remark = remarks(self._record or self._problem, self._outcome)
        return explain(self.status, self.residual, remark, self._problem.statement)

    def __reduce__(self) -> tuple[Any, ...]:
        said = self._record, self.condition, _written(self)
        return _restored, (self._problem, self._outcome, self.status.shape, *said)

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {status.name}" for status, n in tally(self.status).items())
        worst = f"{self.residual.max().item():.1e}" if self.residual.numel() else "none"
        return f"Solution(z={tuple(self.z.shape)}, {counts or 'empty'}, residual ≤ {worst})"


def _refuse(*_: Any) -> Any:
    raise TypeError("a Solution is not a tensor: use solution.z, or another of its tensors.")


# What a tensor would do. `__eq__` stays that of any object.
for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(Solution, f"__{_name}__", _refuse)
    setattr(Solution, f"__r{_name}__", _refuse)
for _name in ("neg", "abs", "len", "getitem", "lt", "le", "gt", "ge", "array"):
    setattr(Solution, f"__{_name}__", _refuse)


def versions(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Counters that torch raises with every write to a tensor; it keeps none in inference mode."""
    return tuple(None if x.is_inference() else x._version for x in tensors)


def _written(solution: Solution) -> list[str]:
    """The names of what was changed in place since: inputs, and what was found."""
    if not solution._versions:
        return []  # compiled code has copies
    problem = solution._problem
    tensors = *problem.inputs, *_found(solution._outcome)
    try:
        now = tuple(map(_VERSION, tensors))
    except RuntimeError:
        now = versions(tensors)
    if now == solution._versions:
        return []
    names = zip((*problem.named, *_FOUND), solution._versions, now, strict=True)
    return [name for name, before, after in names if before != after]


def check_unwritten(
    solution: Solution, what: str = "the loss", of: tuple[str, ...] | None = None
) -> None:
    """Refuse to say `what` of a solution where a tensor of these names was written to since.

    The loss reads all inputs, and all that was found but the residual.
    """
    changed = _written(solution)
    if not changed:
        return
    changed = [name for name in changed if (name != "residual" if of is None else name in of)]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} was changed in place after the solve, so {what} of this "
            f"solution cannot be computed any more. Ask for {what} first, or write to a copy."
        )


def _restored(
    problem: Problem,
    outcome: Outcome,
    batch: torch.Size,
    record: Problem | None,
    condition: Tensor,
    written: list[str],
) -> Solution:
    """A solution from a file, or a copy. What was written to before counts as written to."""
    solution = Solution(problem, outcome, batch)
    pairs = zip((*problem.named, *_FOUND), solution._versions, strict=True)
    versions = tuple(-1 if name in written else version for name, version in pairs)
    solution.__dict__.update(_record=record, _condition=condition, _versions=versions)
    return solution


def _rounded_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, where a proof that goes as far as x goes."""
    near = x.to(dtype)
    return torch.where(near > x, near.nextafter(torch.zeros_like(near)), near)

"""The compiled backend for inequalities and bounds: see csrc/within.h."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from taut.activations import Activation
from taut.analysis import Basis
from taut.backends.arrays import Arrays, Calls, Laid
from taut.backends.base import Rules
from taut.backends.cpu import LARGE, REPAID, USUAL, Cpu, Given, fits, loss, run
from taut.backends.rows import Rows, make_rows
from taut.outcome import Outcome
from taut.problems import Inequalities, Linear, Problem
from taut.systems import Known

_UNIT = 2.0**-52
_INNER = 60  # steps of the interior point method


class _Known(NamedTuple):
    """The rows, as C takes them."""

    rows: Rows
    laid: tuple[Laid | None, ...]  # the plan, and the line
    redundant: Basis | None  # of A, some of whose rows the line leaves out
    address: int  # of the plan
    work: int  # of one evaluation of a sample
    calls: Calls

    @staticmethod
    def of(rows: Rows, A: Basis) -> "_Known":
        plan, line = Laid("plan", rows.plan), rows.line and Laid("line", rows.line)
        ends: dict[str, Tensor | None] = dict(rows.ends)
        found = Arrays("within", rows.plan.sizes, None).addresses(0, ends)
        if found is None:
            raise ValueError("the ends of these rows have not the size that C expects.")
        fixed = {"plan": plan.address, "line": line.address if line else 0}
        fixed |= {"equations": rows.equations} | {name: found[0][name] for name in ends}
        calls = Calls(rows.plan.sizes, **fixed)
        redundant = None if line is None or A.left_out is None else A
        return _Known(rows, (plan, line), redundant, plan.address, rows.plan.work, calls)


def _least(A: Basis, x: Tensor) -> Tensor:
    """x, of all rows, with its first ones less what redundant equations make irrelevant."""
    part = x[:, : A.map.shape[0]]
    part.copy_(A.project(part.to(A.map.data.dtype)))
    return x


@final
class CpuWithin:
    """The compiled code for C = [A; G] and one σ. `alone` is A without G, with its own backend."""

    def __init__(self, C: Basis, alone: Known, activation: Activation) -> None:
        self._C, self._alone, self._activation = C, alone, activation
        rows, outputs = C.map.shape
        self._wait = REPAID if rows * rows * outputs > LARGE else 0
        self._known: _Known | None = None
        self._tried = False
        self._given: dict[torch.dtype, Given] = {}

    @staticmethod
    def suits(C: Basis, alone: Known) -> bool:
        """May there be a plan for these rows?"""
        equations = alone.map.shape[0]
        return fits(C.map) and (equations == 0 or isinstance(alone.backend, Cpu))

    def _layout(self, samples: int) -> _Known | None:
        self._wait -= samples
        if self._tried or self._wait > 0:
            return self._known
        self._tried = True
        A = self._alone.basis_of(self._alone.map)
        rows = make_rows(self._C, A, self._activation)
        if rows is not None:
            self._known = _Known.of(rows, A)
        return self._known

    def attempt(self, problem: Problem, rules: Rules) -> Outcome:
        """Newton's method on the multipliers, from `start` or from those of the equations alone."""
        v, n = problem.inputs[0].contiguous(), len(problem.inputs[0])
        rows = problem.prepared.map.shape[0]
        if type(problem) is not Inequalities or rules.dtype is not torch.float64 or not n:
            return Outcome.open(v, rows)
        known = self._known or self._layout(n)
        if known is None:
            return Outcome.open(v, rows)
        begun = problem.start is None and problem.equations > 0
        found = self._equations(problem, rules) if begun else Outcome.open(v, rows)
        if begun and found.failed == n and not problem.bounds:
            return found
        return self._within(known, problem, rules, found, begun)

    def _equations(self, problem: Inequalities, rules: Rules) -> Outcome:
        """The equations alone; multipliers of the inequalities are 0."""
        count, alone = problem.equations, self._alone
        data, b = problem.data[:count], problem.lower[:, :count]
        first = alone.backend.attempt(Linear(alone, problem.v, data, b), rules)
        more = problem.lower.shape[-1] - count
        return Outcome(
            first.z,
            pad(first.multipliers, (0, more)),
            first.u,
            first.residual,
            first.iterations,
            first.status,
            first.failed,
        )

    def _within(
        self, known: _Known, problem: Inequalities, rules: Rules, found: Outcome, begun: bool
    ) -> Outcome:
        v, bounds, n = problem.v, problem.bounds or (None, None), problem.v.shape[0]
        start, dtype = problem.start, v.dtype
        arrays: Any = {
            "v": v,
            "lower": problem.lower,
            "upper": problem.upper,
            "floor": bounds[0],
            "ceiling": bounds[1],
            "start": None if start is None else start.to(dtype),
            "multipliers": found.multipliers,
            "u": found.u,
            "z": found.z,
            "residual": found.residual,
            "iterations": found.iterations,
            "status": found.status,
        }
        given = self._given.get(dtype)
        if given is None or given.rules is not rules:
            given = self._given[dtype] = Given.of(rules, dtype)
        laid = known.calls["within", dtype].addresses(n, arrays)
        if laid is None:
            return Outcome.open(v, problem.lower.shape[-1])
        call = laid[0] | {name: given.values[name] for name in ("rules", "cap", "slack", "huge")}
        call["begun"], call["target"] = begun, max(rules.tol or 0.0, 8 * _UNIT)
        call["limit"] = min(rules.max_iterations, rules.first)
        call["inner"] = min(rules.max_iterations, _INNER)
        done = run("within", call, n * known.work)
        left, held = done.unsolved, bool(done.held)
        if left == n:  # perhaps for want of memory, without a look at any
            found.status.fill_(-1)
        made = found.z, found.multipliers, found.u, found.residual, found.iterations, found.status
        return Outcome(*made, left, held)

    def pullback(self, u: Tensor, status: Tensor, grads: Any) -> None:
        return None

    def pull_within(
        self,
        problem: Inequalities,
        multipliers: Tensor,
        u: Tensor,
        status: Tensor,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[list[Tensor | None], Tensor, int] | None:
        """The gradients in v, C (none), the sides and the bounds; which samples are open, and how
        many. None says that all are."""
        known, n, dtype = self._known, u.shape[0], u.dtype
        if known is None or not n:
            return None
        sides = problem.lower, problem.upper, *problem.bounds
        floor, ceiling = problem.bounds or (None, None)
        g_z, g_multipliers, g_u = grads
        if known.redundant is not None and g_multipliers is not None:
            g_multipliers = _least(known.redundant, g_multipliers.clone())
        arrays: Any = {
            "u": u,
            "multipliers": multipliers,
            "lower": problem.lower,
            "upper": problem.upper,
            "floor": floor,
            "ceiling": ceiling,
            "g_multipliers": g_multipliers,
            "g_u": g_u,
            "g_z": g_z,
            "status": status,
        }
        names = ("dlower", "dupper", "dfloor", "dceiling")
        wanted = (name for name, need in zip(names, needs[2:], strict=False) if need)
        wanted = ("dv", "left", *wanted)
        found = known.calls["pull", dtype].addresses(n, arrays, wanted)
        if found is None:
            return None
        call, made = found[0], dict(zip(wanted, found[1], strict=True))
        left = made["left"].fill_(True)
        call["rules"] = (self._given.get(dtype) or Given.of(USUAL, dtype)).values["rules"]
        count = run("pull", call, n * known.work).unsolved
        if known.redundant is not None and "dlower" in made:
            _least(known.redundant, made["dlower"])
        others = (made.get(name) for name in names[: len(sides)])
        return [made["dv"], None, *others], left, count

    loss = loss  # b being the sides at which rows are held

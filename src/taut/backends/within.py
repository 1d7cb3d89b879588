"""The compiled backend for inequalities and bounds: see csrc/within.h."""

from ctypes import Structure, addressof
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from taut.activations import Activation
from taut.analysis import Basis
from taut.backends.base import Rules
from taut.backends.cpu import LARGE, REPAID, Cpu, Given, fits, laid_out, readable, run
from taut.backends.rows import Rows, make_rows
from taut.outcome import Outcome
from taut.problems import Inequalities, Linear, Problem
from taut.systems import Known

_UNIT = 2.0**-52


class _Laid(NamedTuple):
    """The rows, as C takes them."""

    rows: Rows
    plan: Structure
    line: Structure | None

    @property
    def values(self) -> dict[str, Any]:
        return {
            "plan": addressof(self.plan),
            "line": None if self.line is None else addressof(self.line),
            "equations": self.rows.equations,
            **{name: x.data_ptr() for name, x in self.rows.ends.items()},
        }


@final
class CpuWithin:
    """The compiled code for C = [A; G] and one σ. `alone` is A without G, with its own backend."""

    def __init__(self, C: Basis, alone: Known, activation: Activation) -> None:
        self._C, self._alone, self._activation = C, alone, activation
        rows, outputs = C.map.shape
        self._wait = REPAID if rows * rows * outputs > LARGE else 0
        self._laid: _Laid | None = None
        self._tried = False
        self._given: dict[torch.dtype, Given] = {}

    @staticmethod
    def suits(C: Basis, alone: Known) -> bool:
        """May there be a plan for these rows?"""
        equations = alone.map.shape[0]
        return fits(C.map) and (equations == 0 or isinstance(alone.backend, Cpu))

    def _layout(self, samples: int) -> _Laid | None:
        self._wait -= samples
        if self._tried or self._wait > 0:
            return self._laid
        self._tried = True
        rows = make_rows(self._C, self._alone.basis_of(self._alone.map), self._activation)
        if rows is not None and rows.line is not None:
            line = laid_out("line", rows.line)
            self._laid = _Laid(rows, laid_out("plan", rows.plan), line)
        return self._laid

    def attempt(self, problem: Problem, rules: Rules) -> Outcome:
        """Newton's method on the multipliers, from `start` or from those of the equations alone."""
        v, n = problem.inputs[0].contiguous(), len(problem.inputs[0])
        nothing = Outcome.open(v, problem.prepared.map.shape[0])
        if type(problem) is not Inequalities or rules.dtype is not torch.float64 or not n:
            return nothing
        laid = self._laid or self._layout(n)
        if laid is None or not readable(*problem.inputs, problem.start) or problem.bounds:
            return nothing
        found = nothing
        begun = problem.start is None and problem.equations > 0
        if begun:
            found = self._equations(problem, rules)
            if found.failed == n:
                return nothing
        return self._within(laid, problem, rules, found, begun)

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
        self, laid: _Laid, problem: Inequalities, rules: Rules, found: Outcome, begun: bool
    ) -> Outcome:
        # Kept by name: C reads them by address.
        v, lower, upper, *bounds = (
            x.contiguous() for x in (problem.v, problem.lower, problem.upper, *problem.bounds)
        )
        start = None if problem.start is None else problem.start.to(v.dtype).contiguous()
        floor, ceiling = bounds or (None, None)
        n, dtype = len(v), v.dtype
        given = self._given.get(dtype)
        if given is None or given.rules is not rules:
            given = self._given[dtype] = Given.of(rules, dtype)
        values = {
            **laid.values,
            **{name: given.values[name] for name in ("rules", "single", "cap", "slack", "huge")},
            "v": v.data_ptr(),
            "lower": lower.data_ptr(),
            "upper": upper.data_ptr(),
            "floor": None if floor is None else floor.data_ptr(),
            "ceiling": None if ceiling is None else ceiling.data_ptr(),
            "start": None if start is None else start.data_ptr(),
            "multipliers": found.multipliers.data_ptr(),
            "u": found.u.data_ptr(),
            "z": found.z.data_ptr(),
            "residual": found.residual.data_ptr(),
            "iterations": found.iterations.data_ptr(),
            "status": found.status.data_ptr(),
            "begun": begun,
            "samples": n,
            "limit": min(rules.max_iterations, rules.first),
            "next": 0,
            "unsolved": n,
            "target": max(rules.tol or 0.0, 8 * _UNIT),
        }
        left = run("within", values, n * laid.rows.plan.work)
        if left == n:  # perhaps for want of memory, without a look at any
            found.status.fill_(-1)
        made = found.z, found.multipliers, found.u, found.residual, found.iterations, found.status
        return Outcome(*made, left)

    def pullback(self, u: Tensor, status: Tensor, grads: Any) -> None:
        return None

    def loss(self, v: Tensor, b: Tensor, y: Tensor, u: Tensor, multipliers: Tensor) -> None:
        return None

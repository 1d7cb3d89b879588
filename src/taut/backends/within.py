"""The compiled backend for inequalities and bounds: see csrc/within.h."""

from collections.abc import Sequence
from ctypes import Structure, addressof
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from taut.activations import Activation
from taut.analysis import Basis
from taut.backends.base import Rules
from taut.backends.cpu import (
    LARGE,
    REPAID,
    USUAL,
    Cpu,
    Given,
    fits,
    laid_out,
    loss,
    readable,
    run,
)
from taut.backends.rows import Rows, make_rows
from taut.outcome import Outcome
from taut.problems import Inequalities, Linear, Problem
from taut.systems import Known

_UNIT = 2.0**-52
_INNER = 60  # steps of the interior point method


class _Known(NamedTuple):
    """The rows, as C takes them."""

    rows: Rows
    plan: Structure
    line: Structure | None
    redundant: Basis | None  # of A, some of whose rows `line` leaves out

    address: int  # of the plan
    work: int  # of one evaluation of a sample

    @property
    def values(self) -> dict[str, Any]:
        return {
            "plan": self.address,
            "line": 0 if self.line is None else addressof(self.line),
            "equations": self.rows.equations,
            "only": 0,
            **{name: x.data_ptr() for name, x in self.rows.ends.items()},
        }


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
        rows = make_rows(self._C, self._alone.basis_of(self._alone.map), self._activation)
        if rows is not None:
            line = None if rows.line is None else laid_out("line", rows.line)
            plan, A = laid_out("plan", rows.plan), self._alone.basis_of(self._alone.map)
            redundant = None if line is None or A.left_out is None else A
            self._known = _Known(rows, plan, line, redundant, addressof(plan), rows.plan.work)
        return self._known

    def attempt(self, problem: Problem, rules: Rules) -> Outcome:
        """Newton's method on the multipliers, from `start` or from those of the equations alone."""
        v, n = problem.inputs[0].contiguous(), len(problem.inputs[0])
        rows = problem.prepared.map.shape[0]
        if type(problem) is not Inequalities or rules.dtype is not torch.float64 or not n:
            return Outcome.open(v, rows)
        known = self._known or self._layout(n)
        if known is None or not readable(*problem.inputs, problem.start):
            return Outcome.open(v, rows)
        begun = problem.start is None and problem.equations > 0
        found = self._equations(problem, rules) if begun else Outcome.open(v, rows)
        if begun and found.failed == n:
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
            **known.values,
            **{name: given.values[name] for name in ("rules", "single", "cap", "slack", "huge")},
            "v": v.data_ptr(),
            "lower": lower.data_ptr(),
            "upper": upper.data_ptr(),
            "floor": 0 if floor is None else floor.data_ptr(),
            "ceiling": 0 if ceiling is None else ceiling.data_ptr(),
            "start": 0 if start is None else start.data_ptr(),
            "multipliers": found.multipliers.data_ptr(),
            "u": found.u.data_ptr(),
            "z": found.z.data_ptr(),
            "residual": found.residual.data_ptr(),
            "iterations": found.iterations.data_ptr(),
            "status": found.status.data_ptr(),
            "begun": begun,
            "samples": n,
            "limit": min(rules.max_iterations, rules.first),
            "inner": min(rules.max_iterations, _INNER),
            "next": 0,
            "unsolved": n,
            "target": max(rules.tol or 0.0, 8 * _UNIT),
        }
        left = run("within", values, n * known.work)
        if left == n:  # perhaps for want of memory, without a look at any
            found.status.fill_(-1)
        made = found.z, found.multipliers, found.u, found.residual, found.iterations, found.status
        return Outcome(*made, left)

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
        known, n = self._known, len(u)
        sides = problem.lower, problem.upper, *problem.bounds
        if known is None or not n or not readable(u, multipliers, *sides, *grads):
            return None
        # Kept by name: C reads them by address.
        u, multipliers, status = u.contiguous(), multipliers.contiguous(), status.contiguous()
        lower, upper, *bounds = (x.contiguous() for x in sides)
        floor, ceiling = bounds or (None, None)
        g_z, g_multipliers, g_u = (None if g is None else g.contiguous() for g in grads)
        if known.redundant is not None and g_multipliers is not None:
            g_multipliers = _least(known.redundant, g_multipliers.clone())
        made = [torch.empty_like(u), None]
        made += [torch.empty_like(x) if need else None for x, need in
                 zip((lower, upper, *bounds), needs[2:], strict=True)]  # fmt: skip
        left = torch.ones(n, dtype=torch.bool, device="cpu")
        given = self._given.get(u.dtype) or Given.of(USUAL, u.dtype)
        dlower, dupper, dfloor, dceiling = (*made[2:], None, None)[:4]
        arrays = {
            "u": u,
            "multipliers": multipliers,
            "lower": lower,
            "upper": upper,
            "floor": floor,
            "ceiling": ceiling,
            "g_multipliers": g_multipliers,
            "g_u": g_u,
            "g_z": g_z,
            "status": status,
            "dv": made[0],
            "dlower": dlower,
            "dupper": dupper,
            "dfloor": dfloor,
            "dceiling": dceiling,
            "left": left,
        }
        values = {name: 0 if x is None else x.data_ptr() for name, x in arrays.items()}
        values |= {name: known.values[name] for name in ("plan", "line")}
        values |= {"rules": given.values["rules"], "single": u.dtype is torch.float32}
        values |= {"samples": n, "next": 0, "unsolved": n}
        count = run("pull", values, n * known.work)
        if known.redundant is not None and dlower is not None:
            _least(known.redundant, dlower)
        return made, left, count

    loss = loss  # b being the sides at which rows are held

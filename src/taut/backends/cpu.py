"""The compiled backend: CPU, one dense A for all samples, activations that have codes.

The C files in csrc/ are compiled when the package is installed, if there is a C compiler. They
take the plain steps of Newton's method, as many samples at a time as the processor's vectors hold,
and decide only that a sample is solved. They are compiled three times: v2 for any processor, v3
for AVX2, v4 for AVX-512; `TAUT_KERNEL=v2`, `v3` or `v4` in the environment forces one,
`TAUT_KERNEL=0` turns the backend off.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from taut.activations import Activation
from taut.analysis import Basis, pivoted, uneven
from taut.backends.arrays import Calls, Laid
from taut.backends.base import Rules
from taut.backends.library import (
    _MOST,
    _functions as _functions,
    _library,
    _structures,
    _variant,
    run,
    structures as structures,
    variant as variant,
)
from taut.backends.plan import Plan, make_plan
from taut.held import slack
from taut.maps import LinearMap
from taut.outcome import Outcome
from taut.problems import Linear, Problem

_LIMIT = 30  # iterations; what takes longer is not easy
_LONG = 90  # of equations of very different size: the way to a small b is long, but plain
# A plan of more products than this is built for this many samples: one alone does not repay it.
LARGE, REPAID = 2**20, 8
_SOLVED = ("z", "u", "multipliers", "residual", "iterations", "status")


class _Known(NamedTuple):
    """The plan, as C takes it."""

    laid: Laid
    address: int
    work: int  # of one evaluation of a sample
    calls: Calls

    @staticmethod
    def of(plan: Plan | None) -> "_Known | None":
        if plan is None:
            return None
        laid = Laid("plan", plan)
        return _Known(laid, laid.address, plan.work, Calls(plan.sizes, plan=laid.address))


class Given(NamedTuple):
    """Rules for numbers of one dtype, as C takes them."""

    rules: Rules
    structure: Structure
    values: dict[str, Any]  # of a solve, as far as they follow from the rules
    calls: list[Any]  # structures that nobody uses: making them takes longer than a small step

    @staticmethod
    def of(rules: Rules, dtype: torch.dtype) -> "Given":
        kind, fields = _structures["rules"]
        structure = kind(**{name: getattr(rules, name) for name in fields})
        values = {
            "rules": addressof(structure),
            "limit": min(rules.max_iterations, _LIMIT),
            "target": rules.target(dtype),
            "cap": rules.cap(dtype),
            "share": rules.share(dtype),
            "slack": slack(torch.finfo(dtype).eps),
            "huge": torch.finfo(dtype).max,
        }
        return Given(rules, structure, values, [])


USUAL = Rules()


def fits(A: LinearMap) -> bool:
    """Is A a matrix that C can read, of a size that it is fast with?"""
    return (
        _library is not None
        and A.data.layout == torch.strided
        and A.data.ndim == 2
        and A.data.dtype == torch.float64
        and A.data.is_cpu
        and 0 < A.shape[0] <= _MOST[_variant]
    )


def loss(
    self: Any, v: Tensor, b: Tensor, y: Tensor, u: Tensor, multipliers: Tensor
) -> Tensor | None:
    """Σψ(y) − yᵀv − bᵀλ + Σφ(u) of each sample: a method of whatever has a plan."""
    known, n = self._known, v.shape[0]
    if known is None:
        return None
    given: Any = {"v": v, "b": b, "y": y, "u": u, "multipliers": multipliers}
    found = known.calls["loss", v.dtype].addresses(n, given, ("loss",))
    if found is None:
        return None
    call, made = found
    left = run("loss", call, n * known.work).unsolved  # for want of memory
    return None if left > 0 else made[0]


@final
class Cpu:
    """The compiled code for one A and one σ. Its plan is built by the first call that repays it."""

    def __init__(self, basis: Basis, activation: Activation) -> None:
        self._basis, self._activation = basis, activation
        self._redundant = basis.left_out is not None
        equations, outputs = basis.map.shape
        self._wait = REPAID if equations * equations * outputs > LARGE else 0
        self._known: _Known | None = None
        self._every: _Known | None = None  # with redundant equations, for samples of their own
        self._tried = False
        self._given: dict[torch.dtype, Given] = {}

    @staticmethod
    def suits(basis: Basis) -> bool:
        """May there be a plan for this A?"""
        return fits(basis.map) and not basis.transformed

    def _plan(self, samples: int) -> "_Known | None":
        self._wait -= samples
        if self._tried or self._wait > 0:
            return self._known
        self._known = _Known.of(make_plan(self._basis, self._activation))
        if self._redundant and self._known is not None:
            self._every = _Known.of(make_plan(self._basis, self._activation, every=True))
        self._tried = True
        return self._known

    def ready(
        self, samples: int, rules: Rules, dtype: torch.dtype
    ) -> tuple["_Known", Given] | None:
        """The plan and the rules as C takes them, where no equation is redundant."""
        known = self._known or self._plan(samples)
        if known is None or not samples or self._redundant or rules.dtype is not torch.float64:
            return None
        given = self._given.get(dtype)
        if given is None or given.rules is not rules:
            given = self._rules(rules, dtype)
        return known, given

    def _rules(self, rules: Rules, dtype: torch.dtype) -> Given:
        """The last rules are kept: they seldom change from call to call."""
        given = self._given[dtype] = Given.of(rules, dtype)
        return given

    def attempt(self, problem: Problem, rules: Rules, left_out: Tensor | None = None) -> Outcome:
        """Newton's method from `start`, or 0, in float64.

        With `left_out`, each sample says which redundant equations it leaves out.
        """
        if type(problem) is not Linear or rules.dtype is not torch.float64:
            return Outcome.open(problem.inputs[0], problem.prepared.map.shape[0])
        if self._redundant and left_out is None:
            apart = uneven(self._basis, problem.b.to(torch.float64))
            if apart is not None:
                return self._separately(problem, rules, apart)
        v, b, start = problem.v, problem.b, problem.start
        n = v.shape[0]
        known = self._known or self._plan(n)
        if left_out is not None:
            known, left_out = self._every, left_out.to(torch.int8)
        if known is None or not n:
            return Outcome.open(v, b.shape[-1])
        dtype = v.dtype
        if start is not None:
            if self._redundant:
                start = self._basis.enter(self._basis.map, start.to(torch.float64))
            start = start.to(dtype)
        given = self._given.get(dtype)
        if given is None or given.rules is not rules:
            given = self._rules(rules, dtype)
        arrays: Any = {"v": v, "b": b, "start": start, "left_out": left_out}
        found = known.calls["solve", dtype].addresses(n, arrays, _SOLVED)
        if found is None:
            return Outcome.open(v, b.shape[-1])
        call, (z, u, multipliers, residual, iterations, status) = found
        call |= given.values
        if left_out is not None:
            call["limit"] = min(rules.max_iterations, _LONG)
        done = run("solve", call, n * known.work)
        unsolved, held = done.unsolved, bool(done.held)
        if unsolved == n:  # perhaps for want of memory, without a look at any
            status.fill_(-1)
        if self._redundant:
            raw, A = multipliers.to(torch.float64), self._basis.map
            eps = torch.finfo(dtype).eps
            multipliers = self._basis.smallest(A, v.to(torch.float64), raw, eps).to(dtype)
        return Outcome(z, multipliers, u, residual, iterations, status, unsolved, held)

    def _separately(self, problem: Linear, rules: Rules, apart: Tensor) -> Outcome:
        """The samples in `apart` by themselves, which leave out equations of their own."""
        outcome = Outcome.open(problem.v, problem.b.shape[-1])
        rest, index = ((apart == own).nonzero().squeeze(-1) for own in (False, True))
        if len(rest):
            outcome = outcome.write(rest, self.attempt(problem.take(rest), rules))
        few = problem.take(index)
        own = pivoted(self._basis, self._basis.map, few.b.to(torch.float64))
        outcome = outcome.write(index, self.attempt(few, rules, own.left_out))
        return replace(outcome, failed=int((outcome.status != 0).sum()))

    def pullback(
        self, u: Tensor, status: Tensor, grads: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, int] | None:
        g_z, g_multipliers, g_u = grads
        known = self._known
        if known is None or (self._redundant and g_multipliers is not None):
            return None
        dtype, n = u.dtype, u.shape[0]
        arrays: Any = {"u": u, "status": status, "g_z": g_z, "g_u": g_u}
        arrays["g_multipliers"] = g_multipliers
        given = self._given.get(dtype) or self._rules(USUAL, dtype)
        found = known.calls["backward", dtype].addresses(n, arrays, ("dv", "db"))
        if found is None:
            return None
        call, (dv, db) = found
        call["rules"] = given.values["rules"]
        left = run("backward", call, n * known.work).unsolved
        if left == n:  # perhaps for want of memory, without a look at any
            db.fill_(torch.nan)
        if self._redundant:
            db = self._basis.outward(db.to(torch.float64)).to(db.dtype)
        return dv, db, left

    loss = loss

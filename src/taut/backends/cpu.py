"""The compiled backend: CPU, one dense A for all samples, activations that have codes.

The C files in csrc/ are compiled when the package is installed, if there is a C compiler. They
take the plain steps of Newton's method, as many samples at a time as the processor's vectors hold,
and decide only that a sample is solved. They are compiled three times: v2 for any processor, v3
for AVX2, v4 for AVX-512; `TAUT_KERNEL=v2`, `v3` or `v4` in the environment forces one,
`TAUT_KERNEL=0` turns the backend off.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter

from taut.activations import Activation
from taut.analysis import Basis
from taut.backends.base import Rules
from taut.backends.library import (
    _MOST,
    _differing,
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
# A plan of more products than this is built for this many samples: one alone does not repay it.
LARGE, REPAID = 2**20, 8


def readable(*tensors: Tensor | None) -> bool:
    """Can C read these by their addresses?

    >>> readable(torch.zeros(2), None), readable(torch.zeros(2, device="meta"))
    (True, False)
    """
    try:
        for x in tensors:
            if x is not None and not (
                type(x) in _PLAIN
                and x.is_cpu
                and x.layout is torch.strided
                and not x.is_neg()
                and x.data_ptr()  # a tensor of zeros that torch never wrote has none
            ):
                return False
    except RuntimeError:  # seen through torch.func: its numbers are elsewhere
        return False
    return True


def laid_out(name: str, plan: Plan) -> Structure:
    """A plan as C takes it; its arrays must outlive it."""
    arrays = {field: x.data_ptr() for field, x in plan.arrays.items()}
    kind, fields = _structures[name]
    values = dict.fromkeys(fields) | arrays | plan.sizes
    if len(values) != len(fields):
        raise _differing(name, values)
    return kind(**values)


class _Known(NamedTuple):
    """The plan, as C takes it."""

    plan: Plan
    structure: Structure
    address: int
    work: int  # of one evaluation of a sample


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
            "single": dtype is torch.float32,
            "limit": min(rules.max_iterations, _LIMIT),
            "target": rules.target(dtype),
            "cap": rules.cap(dtype),
            "share": rules.share(dtype),
            "slack": slack(torch.finfo(dtype).eps),
            "huge": torch.finfo(dtype).max,
        }
        return Given(rules, structure, values, [])


USUAL = Rules()
_PLAIN = (Tensor, Parameter)


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
    known = self._known
    if known is None or not readable(v, b, y, u, multipliers):
        return None
    v, y, u, multipliers = map(Tensor.contiguous, (v, y, u, multipliers))
    b = b if b.stride(-1) == 1 else b.contiguous()
    n, loss = len(v), v.new_empty(len(v))
    values = {
        "plan": known.address,
        "v": v.data_ptr(),
        "b": b.data_ptr(),
        "y": y.data_ptr(),
        "u": u.data_ptr(),
        "multipliers": multipliers.data_ptr(),
        "loss": loss.data_ptr(),
        "samples": n,
        "single": v.dtype is torch.float32,
        "b_stride": b.stride(0),
        "next": 0,
        "unsolved": n,
    }
    left = run("loss", values, n * known.work).unsolved  # for want of memory
    return None if left > 0 else loss


@final
class Cpu:
    """The compiled code for one A and one σ. Its plan is built by the first call that repays it."""

    def __init__(self, basis: Basis, activation: Activation) -> None:
        self._basis, self._activation = basis, activation
        self._redundant = basis.left_out is not None
        equations, outputs = basis.map.shape
        self._wait = REPAID if equations * equations * outputs > LARGE else 0
        self._known: _Known | None = None
        self._tried = False
        self._given: dict[torch.dtype, Given] = {}

    def _rules(self, rules: Rules, dtype: torch.dtype) -> Given:
        """The last rules are kept: they seldom change from call to call."""
        given = self._given.get(dtype)
        if given is None or given.rules is not rules:
            given = self._given[dtype] = Given.of(rules, dtype)
        return given

    @staticmethod
    def suits(basis: Basis) -> bool:
        """May there be a plan for this A?"""
        return fits(basis.map) and not basis.transformed

    def _plan(self, samples: int) -> "_Known | None":
        self._wait -= samples
        if self._tried or self._wait > 0:
            return self._known
        plan = make_plan(self._basis, self._activation)
        if plan is not None:
            structure = laid_out("plan", plan)
            self._known = _Known(plan, structure, addressof(structure), plan.work)
        self._tried = True
        return self._known

    def ready(
        self, samples: int, rules: Rules, dtype: torch.dtype
    ) -> tuple["_Known", Given] | None:
        """The plan and the rules as C takes them, where no equation is redundant."""
        known = self._known or self._plan(samples)
        if known is None or not samples or self._redundant or rules.dtype is not torch.float64:
            return None
        return known, self._rules(rules, dtype)

    def attempt(self, problem: Problem, rules: Rules) -> Outcome:
        """Newton's method from `start`, or 0, in float64."""
        if type(problem) is not Linear or rules.dtype is not torch.float64:
            return Outcome.open(problem.inputs[0], problem.prepared.map.shape[0])
        v, b, start = problem.v, problem.b, problem.start
        n = v.shape[0]
        known = self._known or self._plan(n)
        if known is None or not n or not readable(v, b, start):
            return Outcome.open(v, b.shape[-1])
        v, b = v.contiguous(), b if b.stride(-1) == 1 else b.contiguous()
        if start is not None:
            if self._redundant:
                start = self._basis.enter(self._basis.map, start.to(torch.float64))
            start = start.to(v.dtype).contiguous()
        dtype = v.dtype
        given = self._given.get(dtype)
        if given is None or given.rules is not rules:
            given = self._rules(rules, dtype)
        z, u, multipliers = torch.empty_like(v), torch.empty_like(v), v.new_empty(n, b.shape[-1])
        residual, iterations = v.new_empty(n), v.new_empty(n, dtype=torch.long)
        status = torch.empty_like(iterations)
        values = {
            "plan": known.address,
            "v": v.data_ptr(),
            "b": b.data_ptr(),
            "start": 0 if start is None else start.data_ptr(),
            "index": 0,
            "multipliers": multipliers.data_ptr(),
            "u": u.data_ptr(),
            "z": z.data_ptr(),
            "residual": residual.data_ptr(),
            "iterations": iterations.data_ptr(),
            "status": status.data_ptr(),
            "samples": n,
            "b_stride": b.stride(0),
            "next": 0,
            "unsolved": n,
            "held": 0,
            **given.values,
        }
        made = run("solve", values, n * known.work)
        unsolved, held = made.unsolved, bool(made.held)
        if unsolved == n:  # perhaps for want of memory, without a look at any
            status.fill_(-1)
        if self._redundant:
            raw, A = multipliers.to(torch.float64), self._basis.map
            eps = torch.finfo(dtype).eps
            multipliers = self._basis.smallest(A, v.to(torch.float64), raw, eps).to(dtype)
        return Outcome(z, multipliers, u, residual, iterations, status, unsolved, held)

    def pullback(
        self, u: Tensor, status: Tensor, grads: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, int] | None:
        g_z, g_multipliers, g_u = grads
        known = self._known
        if known is None or (self._redundant and g_multipliers is not None):
            return None
        if not readable(u, g_z, g_multipliers, g_u):
            return None
        # Kept by name: C reads them by address.
        u, status = u.contiguous(), status.contiguous()
        g_z = None if g_z is None else g_z.contiguous()
        g_multipliers = None if g_multipliers is None else g_multipliers.contiguous()
        g_u = None if g_u is None else g_u.contiguous()
        dtype, n, I = u.dtype, len(u), known.plan.sizes["constraints"]
        dv, db = torch.empty_like(u), u.new_empty(n, I)
        given = self._given.get(dtype) or self._rules(USUAL, dtype)
        values = {
            "plan": known.address,
            "rules": given.values["rules"],
            "dv": dv.data_ptr(),
            "db": db.data_ptr(),
            "samples": n,
            "single": dtype is torch.float32,
            "next": 0,
            "unsolved": n,
            "u": u.data_ptr(),
            "g_multipliers": 0 if g_multipliers is None else g_multipliers.data_ptr(),
            "g_u": 0 if g_u is None else g_u.data_ptr(),
            "g_z": 0 if g_z is None else g_z.data_ptr(),
            "status": status.data_ptr(),
        }
        left = run("backward", values, n * known.work).unsolved
        if left == n:  # perhaps for want of memory, without a look at any
            db.fill_(torch.nan)
        if self._redundant:
            db = self._basis.outward(db.to(torch.float64)).to(db.dtype)
        return dv, db, left

    loss = loss

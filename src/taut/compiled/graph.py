"""What a compiler sees: tensors made flat, and one op."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from taut.activations import Activation, resolve
from taut.autograd import check_recorded, uncompiled
from taut.compiled.ops import DTYPES
from taut.maps import LinearMap, stacked
from taut.outcome import Outcome
from taut.pose import fitted, fitted_sides
from taut.prepare import Prepared, Unprepared
from taut.problems import Inequalities, Linear
from taut.solution import Solution
from taut.solvers import Newton

SPARSE = "a graph cannot carry a sparse matrix: pass A.to_dense()."
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def call(
    function: Callable[..., Solution], v: Any, A: Any, b: Any, options: dict[str, Any]
) -> Solution:
    """`taut.project`, the `function`, in a graph, or between two where a graph cannot carry it."""
    check_recorded()
    given, solver, init = options["activation"], options["solver"], options["init"]
    chosen = resolve("linear" if given is None else given)
    if isinstance(A, Prepared):
        chosen = A.activation if given is None else chosen
    reason = _refusal(A, chosen, options)
    if reason is not None:
        return uncompiled(function, reason)(v, A, b, **options)
    if isinstance(init, Solution):
        init = init.multipliers
    elif isinstance(init, tuple):
        init = init[1]
    sides = options["G"], options["lower"], options["upper"]
    return project(v, A, b, sides, chosen, solver, init, options["on_failure"] == "raise")


def _refusal(A: Any, activation: Activation, options: dict[str, Any]) -> str | None:
    """Why this is not for a graph: a sentence, or None where it is."""
    if activation._written is None:
        return (
            f"the activation {activation.name!r} is made of Python functions, which a graph cannot "
            "carry: take one of taut.activations, or what can be made from them."
        )
    if not isinstance(options["solver"], Newton):
        return f"a graph can carry taut.Newton, and not {type(options['solver']).__name__}."
    prepared = isinstance(A, Prepared)
    if options["h"] is not None or options["params"] or (prepared and A.h is not None):
        return (
            "h is a Python function, which the solve differentiates. Export the network up to v, "
            "and project where Python runs."
        )
    if prepared:
        if A.activation is not activation:
            return "this A was prepared for another activation."
        return SPARSE if A.map.sparse else None
    matrices = (A, options["G"])
    sparse = any(isinstance(x, Tensor) and x.layout is not torch.strided for x in matrices)
    return SPARSE if sparse else None


def project(
    v: Any,
    A: Any,
    b: Any,
    sides: tuple[Any, Any, Any],
    activation: Activation,
    solver: Newton,
    init: Any,
    fail: bool,
) -> Solution:
    """`taut.project` in a graph; `sides` are G, lower and upper."""
    G, lower, upper = sides
    if isinstance(A, Prepared):
        A, G = A.A if A.A.shape[-2] or b is not None else None, A.G
    if G is lower is upper is None and A is not None and b is not None:
        v, A, b, init = fitted(v, A, b, init)
    else:
        v, A, b, G, lower, upper, init = fitted_sides(v, A, b, G, lower, upper, init)
    batch, v = v.shape[:-1], v.reshape(-1, v.shape[-1])

    def flat(x: Tensor) -> Tensor:
        return x.expand(*batch, x.shape[-1]).reshape(v.shape[0], x.shape[-1])

    held, equations, b = stacked(A, G), A.shape[-2], flat(b)
    C = held.data
    start = None if init is None else flat(init.detach())
    known: Any = Traced(activation, held, None if lower is None else equations)
    if lower is None or upper is None:
        problem: Any = Linear(known, v, C, b, start)
    else:  # all that an equation gives to its sides goes to the lower one, which is b
        low, high, bounds = b, b.detach(), (flat(lower), flat(upper))
        if G is not None:
            low, high = torch.cat([low, bounds[0]], -1), torch.cat([high, bounds[1]], -1)
            bounds = ()
        problem = Inequalities(known, v, C, low, high, bounds, equations, start)
    rules = (solver.tol, solver.max_iterations, _NAMES[solver.dtype], fail)
    z, multipliers, u, *rest = torch.ops.taut.solve(*settings(problem), start, *rules)
    residual, iterations, status = rest
    outcome = Outcome(z, multipliers, u, residual, iterations, status, -1, True)
    return Solution(problem, outcome, batch)


def matched_loss(solution: Solution, y: Tensor) -> Tensor:
    """`taut.matched_loss` of flat samples in a graph."""
    outcome = solution._outcome
    found = outcome.z, outcome.multipliers, outcome.u, outcome.status
    return torch.ops.taut.matched_loss(*arguments(solution), *found, y)


def arguments(solution: Solution) -> tuple:
    """What each op on this solution begins with."""
    return settings(solution._problem)


def settings(problem: Any) -> tuple:
    """What each op begins with: σ, how many rows are A's, the inputs of the problem."""
    written, rows = problem.prepared.activation._written, problem.inputs[2].shape[-1]
    if isinstance(problem, Linear):
        return *written, rows, *problem.inputs, None, None, None
    return *written, problem.equations, *problem.inputs, *((None, None)[len(problem.bounds) :])


@final
@dataclass(frozen=True, eq=False)
class Traced:
    """What is known of σ and C in a graph: nothing, until somebody asks outside of it."""

    activation: Activation
    map: LinearMap
    equations: int | None

    @cached_property
    def known(self) -> Prepared:
        """What is to be known."""
        data = self.map.over(self.map.data.detach())
        return Unprepared(self.activation, data, self.equations).prepared(data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.known, name)

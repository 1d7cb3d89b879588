"""What a compiler sees: tensors made flat, and one op."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from taut.accept import is_scipy
from taut.activations import Activation, resolve
from taut.autograd import check_recorded, transforming, uncompiled
from taut.compiled.ops import DTYPES
from taut.maps import LinearMap, stacked
from taut.outcome import Outcome
from taut.pose import fitted, fitted_sides
from taut.prepare import Prepared, Unprepared
from taut.problems import Inequalities, Linear, Nonlinear
from taut.solution import Solution
from taut.solvers import Newton

SPARSE = "a graph cannot carry a sparse matrix: pass A.to_dense()."
_OWN = (
    "the activation {!r} is made of Python functions, which a graph cannot carry: take one of "
    "taut.activations, or what can be made from them."
)
_CURVED = (
    "h is a Python function, which the solve differentiates. Export the network up to v, and "
    "project where Python runs."
)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def call(
    function: Callable[..., Solution], v: Any, A: Any, b: Any, options: dict[str, Any]
) -> Solution:
    """`taut.project`, the `function`, in a graph, or between two where a graph cannot carry it."""
    check_recorded()
    chosen = _chosen(A, options["activation"])
    reason = _refusal(A, chosen, options)
    if reason is not None:
        return uncompiled(function, reason)(v, A, b, **options)
    sides = options["G"], options["lower"], options["upper"]
    fail = options["on_failure"] == "raise"
    return project(v, A, b, sides, chosen, options["solver"], _start(options["init"]), fail)


def loss(v: Any, A: Any, b: Any, y: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The matched loss of each sample, and the λ to be kept, by one op.

    None where that takes the three calls: only v gets a gradient here.
    """
    check_recorded()
    init, chosen = options["init"], resolve(options["activation"])
    sides = options["G"], options["lower"], options["upper"]
    learned = (x.requires_grad for x in (A, b, y, *sides) if isinstance(x, Tensor))
    if transforming() or _refusal(A, chosen, options) is not None or any(learned):
        return None
    problem, batch = _posed(v, A, b, sides, chosen, init)
    like = problem.v
    if not isinstance(y, Tensor) or y.shape != (*batch, like.shape[-1]):
        return None
    if init is not None and (init.shape[:-1] != batch or init.dtype is not like.dtype):
        return None  # in another dtype what is kept would be rounded
    rules = settings_of(options["solver"], options["on_failure"] == "raise")
    y = y.to(like.dtype).reshape(like.shape)
    found = torch.ops.taut.loss(*settings(problem), problem.start, *rules, y)
    return found[0].reshape(batch), found[2].reshape(*batch, found[2].shape[-1])


def _chosen(A: Any, given: Any) -> Activation:
    if isinstance(A, Prepared) and given is None:
        return A.activation
    return resolve("linear" if given is None else given)


def _start(init: Any) -> Any:
    if isinstance(init, Solution):
        return init.multipliers
    return init[1] if isinstance(init, tuple) else init


def _refusal(A: Any, activation: Activation, options: dict[str, Any]) -> str | None:
    """Why this is not for a graph: a sentence, or None where it is."""
    if activation._written is None:
        return _OWN.format(activation.name)
    if not isinstance(options["solver"], Newton):
        return f"a graph can carry taut.Newton, and not {type(options['solver']).__name__}."
    prepared = isinstance(A, Prepared)
    if options["h"] is not None or options["params"] or (prepared and A.h is not None):
        return _CURVED
    if prepared:
        if A.activation is not activation:
            return "this A was prepared for another activation."
        return SPARSE if A.map.sparse else None
    matrices = (A, options["G"])
    sparse = any(
        x.layout is not torch.strided if isinstance(x, Tensor) else is_scipy(x) for x in matrices
    )
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
    problem, batch = _posed(v, A, b, sides, activation, init)
    rules = settings_of(solver, fail)
    z, multipliers, u, *rest = torch.ops.taut.solve(*settings(problem), problem.start, *rules)
    residual, iterations, status = rest
    outcome = Outcome(z, multipliers, u, residual, iterations, status, -1, True)
    return Solution(problem, outcome, batch)


def _posed(
    v: Any, A: Any, b: Any, sides: tuple[Any, Any, Any], activation: Activation, init: Any
) -> tuple[Any, torch.Size]:
    """The samples, flat, and their batch dimensions."""
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
        return Linear(known, v, C, b, start), batch
    # All that an equation gives to its sides goes to the lower one, which is b.
    low, high, bounds = b, b.detach(), (flat(lower), flat(upper))
    if G is not None:
        low, high = torch.cat([low, bounds[0]], -1), torch.cat([high, bounds[1]], -1)
        bounds = ()
    return Inequalities(known, v, C, low, high, bounds, equations, start), batch


def settings_of(solver: Newton, fail: bool) -> tuple[Any, ...]:
    """A solver as an op takes it."""
    return solver.tol, solver.max_iterations, _NAMES[solver.dtype], fail


def unfit(solution: Solution) -> str | None:
    """Why the matched loss of a solution made outside of a graph is not for one, or None."""
    prepared = solution._problem.prepared
    if prepared.activation._written is None:
        return _OWN.format(prepared.activation.name)
    if isinstance(solution._problem, Nonlinear):
        return _CURVED
    return SPARSE if prepared.map.sparse else None


def matched_loss(solution: Solution, y: Tensor) -> Tensor:
    """`taut.matched_loss` of flat samples in a graph."""
    outcome = solution._outcome
    found = outcome.z, outcome.multipliers, outcome.u, outcome.status
    return torch.ops.taut.matched_loss(*arguments(solution), *found, y)[0]


def arguments(solution: Solution) -> tuple[Any, ...]:
    """What each op on this solution begins with."""
    return settings(solution._problem)


def settings(problem: Any) -> tuple[Any, ...]:
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

"""taut.project: pose, numbers, derivatives, answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from taut import compiled
from taut.accept import Numbers, as_floating, check_h, check_labels, is_scipy
from taut.activations import Activation, resolve
from taut.autograd import check_followed, followed, recording, transforming, unseen
from taut.implicit import solve
from taut.maps import as_map, stacked
from taut.memory import LagrangeMemory
from taut.outcome import failure
from taut.pose import (
    Curved,
    Given,
    check_range,
    fitted,
    fitted_curved,
    fitted_sides,
    pose,
    pose_curved,
    pose_sides,
)
from taut.prepare import Prepared, Unprepared, examined, examined_with
from taut.problems import Problem
from taut.problems.surface import Equations
from taut.remarks import remarks
from taut.solution import Solution
from taut.solvers import Newton, Solver

OnFailure = Literal["raise", "return"]
#: Where to start: multipliers, a solution, or a pair (u, multipliers).
Init = Float[Tensor, "*init_batch multipliers"] | Solution | tuple[Tensor, Tensor] | None


def project(
    v: Float[Tensor, "*batch K"] | Numbers,
    A: Float[Tensor, "*A_batch I K"] | Numbers | Prepared | None = None,
    b: Float[Tensor, "*b_batch I"] | Numbers | None = None,
    *,
    G: Float[Tensor, "*G_batch M K"] | Numbers | None = None,
    lower: Float[Tensor, "*lower_batch"] | Numbers | float | None = None,
    upper: Float[Tensor, "*upper_batch"] | Numbers | float | None = None,
    h: Equations | None = None,
    params: Sequence[Float[Tensor, "..."] | Numbers] = (),
    activation: str | Activation | None = None,
    solver: Solver = Newton(),
    init: Init = None,
    on_failure: OnFailure = "raise",
) -> Solution:
    """The Bregman projection of σ(v) on {z : A z = b, lower ≤ G z ≤ upper}: z = σ(v + Aᵀλ + Gᵀν).

    With `h` it is that on {z : A z = b, h(z, *params) = 0}. h is a function of a flat batch, (N, K)
    and params with N in front to (N, M), in torch, twice differentiable; each of `params` is
    (*batch, …) and gets gradients. It is called with float64. That set is curved: CONVERGED says
    that z satisfies the equations to rounding and is nearer than its neighbours there, not that it
    is the nearest of all, and a failure proves nothing. There are no G and bounds beside h.

    Without G, `lower` and `upper` bound z itself, which is then clipped: exactly at its bounds,
    with no multipliers. A side is a number, (M,) or (*batch, M); None or ±inf is none.

    A is (I, K), dense or torch sparse, for all samples, or dense (*batch, I, K), or what
    `taut.prepare` made of it; b is (*batch, I), or (I,) for all. `activation` is "linear" unless
    given here or to `prepare`. Lists and NumPy arrays become tensors of v's dtype. The solve runs
    in float64 whatever that is; autocast does not reach inside, and a half-precision v gives a
    float32 z.
    `init` is where to start: multipliers, a Solution, or a pair (u, multipliers).
    `z`, `multipliers` and `u` are differentiable in v, A and b, twice. Each sample of the batch
    is judged alone; `on_failure` says whether one that fails raises `SolveError` or is returned
    with its `status`, z as far as it got, and zero gradients.

    >>> import torch, taut
    >>> v = torch.tensor([1.0, 2.0, 3.0])
    >>> taut.project(v, torch.ones(1, 3), torch.ones(1), activation="exp").z  # softmax
    tensor([0.0900, 0.2447, 0.6652])
    >>> taut.project(v / 2, torch.ones(1, 3), torch.ones(1), lower=0.0).z  # sparsemax
    tensor([0.0000, 0.2500, 0.7500])
    >>> circle = lambda z, radius: z.norm(dim=-1, keepdim=True) - radius
    >>> taut.project(torch.tensor([3.0, 4.0]), h=circle, params=(torch.ones(1),)).z
    tensor([0.6000, 0.8000])
    """
    if torch.compiler.is_compiling() or recording() or _unfit(A, G):
        check_settings(solver, on_failure)
        options = {"activation": activation, "solver": solver, "init": init, "h": h}
        sides = {"G": G, "lower": lower, "upper": upper, "params": params}
        return compiled.call(project, v, A, b, {**sides, **options, "on_failure": on_failure})
    check_settings(solver, on_failure)
    if not isinstance(A, (Tensor, Prepared)) or G is not None:
        check_labels(v=v, A=A, G=G)
    if h is not None or params or getattr(A, "h", None) is not None:
        sided = G is not None or lower is not None or upper is not None
        return _curved(v, A, b, (h, params, sided), activation, solver, init, on_failure)
    if init is not None and not isinstance(init, Tensor):
        init = begin(init)
    if G is not None or lower is not None or upper is not None or A is None or b is None:
        return _within(v, A, b, (G, lower, upper), activation, solver, init, on_failure)
    if isinstance(A, Prepared):
        if A.G is not None:
            return _within(v, A, b, (None, None, None), activation, solver, init, on_failure)
        v, _, b, init = fitted(v, A.A, b, init)
        return projected(_usable(A, activation), v, None, b, solver, init, on_failure)
    chosen = resolve("linear" if activation is None else activation)
    v, A, b, init = fitted(v, A, b, init)
    return projected(known(A, chosen), v, A, b, solver, init, on_failure)


def reconcile(
    y: Float[Tensor, "*batch K"] | Numbers,
    A: Float[Tensor, "*A_batch I K"] | Numbers | Prepared | None = None,
    b: Float[Tensor, "*b_batch I"] | Numbers | None = None,
    *,
    G: Float[Tensor, "*G_batch M K"] | Numbers | None = None,
    lower: Float[Tensor, "*lower_batch"] | Numbers | float | None = None,
    upper: Float[Tensor, "*upper_batch"] | Numbers | float | None = None,
    h: Equations | None = None,
    params: Sequence[Float[Tensor, "..."] | Numbers] = (),
    activation: str | Activation | None = None,
    solver: Solver = Newton(),
    init: Init = None,
    on_failure: OnFailure = "raise",
) -> Solution:
    """The nearest z to y that satisfies the constraints, for predictions y that are there already.

    Nearest in the geometry of the activation: B(z‖y) is least. y may lie anywhere in the closed
    range; an output of y at an end of it stays there, and has gradient 0. Everything else is as
    in `project`, whose v is the u(y) of the activation.

    >>> import torch, taut
    >>> y = torch.tensor([0.0, 2.0, 4.0])  # nothing, a third, two thirds
    >>> taut.reconcile(y, torch.ones(1, 3), torch.tensor([12.0]), activation="exp").z
    tensor([0.0000, 4.0000, 8.0000])
    """
    check_followed()
    if isinstance(A, Prepared):
        chosen = A.activation
    else:
        chosen = resolve("linear" if activation is None else activation)
    check_labels(y=y, A=A, G=G)
    y = as_floating("y", y, None)
    if on_failure == "raise" and not transforming():
        check_range("y", y, chosen)
    v = _predictor(y, chosen)
    sides = {"G": G, "lower": lower, "upper": upper, "h": h, "params": params}
    options = {"activation": activation, "solver": solver, "init": init}
    return project(v, A, b, **sides, **options, on_failure=on_failure)


def _predictor(y: Tensor, activation: Activation) -> Tensor:
    """u(y), infinite at the ends of the range, where its derivative is taken as 0."""
    lower, upper = activation.range.bounds(y)
    low, high = y == lower, y == upper
    inside = torch.where(low | high, activation.sigma(torch.zeros_like(y)), y)
    v = activation.inverse(inside)
    return torch.where(low, -torch.inf, torch.where(high, torch.inf, v))


def _within(
    v: Any,
    A: Any,
    b: Any,
    sides: tuple[Any, ...],
    activation: str | Activation | None,
    solver: Solver,
    init: Any,
    on_failure: OnFailure,
) -> Solution:
    """`project` with inequalities or bounds."""
    G, lower, upper = sides
    if isinstance(A, Prepared):
        if G is not None:
            raise ValueError("a Prepared has its G already: leave G out, or prepare(A, G=G).")
        prepared = _usable(A, activation)
        own = None if prepared.A.shape[-2] == 0 and b is None else prepared.A
        given = fitted_sides(v, own, b, prepared.G, lower, upper, init)
        prepared = prepared.bounded if prepared.G is None else prepared
        return projected_within(prepared, given, False, solver, on_failure)
    chosen = resolve("linear" if activation is None else activation)
    given = fitted_sides(v, A, b, G, lower, upper, init)
    return projected_within(known_with(given.A, given.G, chosen), given, True, solver, on_failure)


def projected_within(
    prepared: Prepared | Unprepared, given: Given, live: bool, solver: Solver, on_failure: OnFailure
) -> Solution:
    """`projected` with inequalities or bounds; `live` says that A and G get gradients."""
    device = given.v.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return projected_within(prepared, given, live, solver, on_failure)
    problem, batch = pose_sides(prepared, given, live)
    return _answered(problem, batch, solver, on_failure)


def known_with(A: Tensor, G: Tensor | None, activation: Activation) -> Prepared | Unprepared:
    """`known`, with inequalities or, where G is None, bounds."""
    if transforming() and unseen(A, G):
        return Unprepared(activation, stacked(A, G), A.shape[-2])
    if G is None:
        return examined(A, activation).bounded
    return examined_with(A, G, activation)


def begin(init: Any) -> Any:
    """The multipliers to start A z = b and inequalities from: u follows from them."""
    if isinstance(init, Solution):
        return init.multipliers
    _check_no_memory(init)
    if isinstance(init, tuple) and len(init) == 2 and isinstance(init[0], Tensor):
        return init[1]
    return init


def _check_no_memory(init: Any) -> None:
    if isinstance(init, LagrangeMemory):
        raise TypeError("init must hold the multipliers of these samples: init=memory[index].")


def _curved(
    v: Any,
    A: Any,
    b: Any,
    equations: tuple[Any, ...],
    activation: str | Activation | None,
    solver: Solver,
    init: Any,
    on_failure: OnFailure,
) -> Solution:
    """`project` with nonlinear equations."""
    h, params, sided = equations
    if isinstance(A, Prepared):
        if h is not None or A.h is None:
            raise ValueError(
                "a Prepared has its h already: prepare(A, activation, h=h), and leave h out here."
            )
        check_h(A.h, sided)
        prepared = _usable(A, activation)
        if prepared.A.shape[-2] == 0 and b is None:
            given = fitted_curved(v, None, None, params, pair(init))
            prepared = known_curved(given.A, A.h, prepared.activation)
        else:
            given = fitted_curved(v, prepared.A, b, params, pair(init))
        return projected_curved(prepared, given, False, solver, on_failure)
    if h is None:
        raise ValueError("params are what h takes after z, and there is no h: pass h=….")
    check_h(h, sided)
    chosen = resolve("linear" if activation is None else activation)
    given = fitted_curved(v, A, b, params, pair(init))
    prepared = known_curved(given.A, h, chosen)
    return projected_curved(prepared, given, True, solver, on_failure)


def pair(init: Any) -> Any:
    """Where to start nonlinear equations: a solution is its u and its multipliers."""
    _check_no_memory(init)
    return (init.u, init.multipliers) if isinstance(init, Solution) else init


def known_curved(A: Tensor, h: Equations, activation: Activation) -> Prepared | Unprepared:
    """`known`, with nonlinear equations."""
    return curved(known(A, activation), h)


def curved(known: Prepared | Unprepared, h: Equations) -> Prepared | Unprepared:
    """The same with nonlinear equations."""
    return replace(known, h=h) if isinstance(known, Unprepared) else known.curved(h)


def projected_curved(
    prepared: Prepared | Unprepared,
    given: Curved,
    live: bool,
    solver: Solver,
    on_failure: OnFailure,
) -> Solution:
    """`projected` with nonlinear equations; `live` says that A gets a gradient."""
    with torch.autocast(given.v.device.type, enabled=False):
        problem, batch = pose_curved(prepared, given, live)
        if transforming():
            problem.check_closure()
        return _answered(problem, batch, solver, on_failure)


def _answered(
    problem: Problem, batch: torch.Size, solver: Solver, on_failure: OnFailure
) -> Solution:
    """The solution, or the error that names the samples without one."""
    outcome = solve(problem, solver, on_failure == "raise")
    solution = Solution(problem, outcome, batch)
    if on_failure == "raise" and outcome.failed > 0:
        remark, statement = remarks(problem, outcome), problem.statement
        raise failure(solution.status, solution.residual, remark, statement)
    return solution


def projected(
    prepared: Prepared | Unprepared,
    v: Tensor,
    A: Tensor | None,
    b: Tensor,
    solver: Solver,
    init: Tensor | None,
    on_failure: OnFailure,
) -> Solution:
    """`project` with what is fixed worked out; A is the live tensor that gets gradients."""
    if torch.is_autocast_enabled(v.device.type):
        with torch.autocast(v.device.type, enabled=False):
            return projected(prepared, v, A, b, solver, init, on_failure)
    problem, batch = pose(prepared, v, A, b, init)
    outcome = solve(problem, solver, on_failure == "raise")
    solution = Solution(problem, outcome, batch)
    if on_failure == "raise" and outcome.failed > 0:
        raise failure(solution.status, solution.residual, remarks(problem, outcome))
    return solution


def _unfit(A: Any, G: Any) -> bool:
    """Is a matrix sparse, and a compiler looking on, which would fail somewhere in between?"""
    layouts = {getattr(x, "layout", torch.strided) for x in (A, G)}
    return (layouts != {torch.strided} or is_scipy(A) or is_scipy(G)) and followed()


def check_settings(solver: Any, on_failure: Any) -> None:
    """Refuse what is not a solver, or no way to handle failures."""
    if on_failure not in ("raise", "return"):
        raise ValueError(f'on_failure must be "raise" or "return"; got {on_failure!r}.')
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be a taut.Solver, such as taut.Newton(); got {solver!r}.")


def known(A: Tensor, activation: Activation) -> Prepared | Unprepared:
    """What is known of A and σ; under a transform, that it cannot be known yet."""
    if transforming() and unseen(A):
        return Unprepared(activation, as_map(A if A.ndim < 4 else A.flatten(0, -3)))
    return examined(A, activation)


def _usable(prepared: Prepared, activation: str | Activation | None) -> Prepared:
    if activation is not None and resolve(activation) is not prepared.activation:
        raise ValueError(
            f"this A was prepared for {prepared.activation.name!r}; got "
            f"activation={resolve(activation).name!r}. Leave it out, or prepare A again."
        )
    return prepared

"""taut.project: pose, numbers, derivatives, answer."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from taut.accept import Numbers
from taut.activations import Activation, resolve
from taut.autograd import is_transformed, transforming, uncompiled
from taut.implicit import solve
from taut.maps import as_map
from taut.outcome import failure
from taut.pose import fitted, pose
from taut.prepare import Prepared, Unprepared, examined
from taut.solution import Solution
from taut.solvers import Newton, Solver

OnFailure = Literal["raise", "return"]


def project(
    v: Float[Tensor, "*batch K"] | Numbers,
    A: Float[Tensor, "*A_batch I K"] | Numbers | Prepared,
    b: Float[Tensor, "*b_batch I"] | Numbers,
    *,
    activation: str | Activation | None = None,
    solver: Solver = Newton(),
    init: Float[Tensor, "*init_batch I"] | Solution | None = None,
    on_failure: OnFailure = "raise",
) -> Solution:
    """The Bregman projection of σ(v) on {z : A z = b}: z = σ(v + Aᵀλ) with A z = b.

    A is (I, K), dense or torch sparse, for all samples, or dense (*batch, I, K), or what
    `taut.prepare` made of it; b is (*batch, I), or (I,) for all. `activation` is "linear" unless
    given here or to `prepare`. Lists and NumPy arrays become tensors of v's dtype. The solve runs
    in float64 whatever that is; autocast does not reach inside, and a half-precision v gives a
    float32 z.
    `z`, `multipliers` and `u` are differentiable in v, A and b, twice. Each sample of the batch
    is judged alone; `on_failure` says whether one that fails raises `SolveError` or is returned
    with its `status`, z as far as it got, and zero gradients.

    >>> import torch, taut
    >>> v = torch.tensor([1.0, 2.0, 3.0])
    >>> taut.project(v, torch.ones(1, 3), torch.ones(1), activation="exp").z  # softmax
    tensor([0.0900, 0.2447, 0.6652])
    """
    if torch.compiler.is_compiling():
        return uncompiled(project)(
            v, A, b, activation=activation, solver=solver, init=init, on_failure=on_failure
        )
    check_settings(solver, on_failure)
    init = init.multipliers if isinstance(init, Solution) else init
    if isinstance(A, Prepared):
        v, _, b, init = fitted(v, A.A, b, init)
        return projected(_usable(A, activation), v, None, b, solver, init, on_failure)
    chosen = resolve("linear" if activation is None else activation)
    v, A, b, init = fitted(v, A, b, init)
    return projected(known(A, chosen), v, A, b, solver, init, on_failure)


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
        raise failure(solution.status, solution.residual, problem.named)
    return solution


def check_settings(solver: Any, on_failure: Any) -> None:
    """Refuse what is not a solver, or no way to handle failures."""
    if on_failure not in ("raise", "return"):
        raise ValueError(f'on_failure must be "raise" or "return"; got {on_failure!r}.')
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be a taut.Solver, such as taut.Newton(); got {solver!r}.")


def known(A: Tensor, activation: Activation) -> Prepared | Unprepared:
    """What is known of A and σ; under a transform, that it cannot be known yet."""
    if transforming() and is_transformed(A):
        return Unprepared(activation, as_map(A if A.ndim < 4 else A.flatten(0, -3)))
    return examined(A, activation)


def _usable(prepared: Prepared, activation: str | Activation | None) -> Prepared:
    if activation is not None and resolve(activation) is not prepared.activation:
        raise ValueError(
            f"this A was prepared for {prepared.activation.name!r}; got "
            f"activation={resolve(activation).name!r}. Leave it out, or prepare A again."
        )
    if prepared.changed():
        raise ValueError(
            "A was changed in place after it was prepared. Prepare it again, or prepare a copy."
        )
    return prepared

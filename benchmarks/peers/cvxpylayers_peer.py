"""cvxpylayers (torch): the primal problem written in CVXPY, on each CPU back end it has.

The back end is chosen by ``solver``: None or "DIFFCP" hands the cone program to diffcp, whose
``solve_method`` is SCS (the default) or Clarabel; "MOREAU" hands it to Moreau, batched. A is a
constant of the problem, v and b are its parameters, so that nothing is canonicalised twice.
"""

from importlib.metadata import version
from typing import Any

import cvxpy as cp
import torch
from cvxpylayers.torch import CvxpyLayer

from peers.protocol import Call, Variant, main
from peers.torch_call import torch_call
from problems import Problem

FAMILIES = ("sigmoid", "doubly_stochastic", "linear", "softmax", "cover", "nonnegative")
FAMILIES += ("quadratic", "exp_within", "sigmoid_within", "cover_within")
TIGHT = [10.0**-k for k in range(8, 15)]
DENSE_LIMIT = 128


def _program(problem: Problem) -> tuple[cp.Problem, list[cp.Parameter], cp.Variable]:
    """minimise τ Σ ψ(z) − vᵀz subject to A z = b."""
    constraints_count, outputs = problem.A.shape
    z, v, b = cp.Variable(outputs), cp.Parameter(outputs), cp.Parameter(constraints_count)
    match problem.activation:
        case "linear":
            objective = cp.sum_squares(z - v) / 2
        case "exp":
            objective = -problem.temperature * cp.sum(cp.entr(z)) - v @ z
        case _:
            objective = -cp.sum(cp.entr(z)) - cp.sum(cp.entr(1 - z)) - v @ z
    rules, parameters = [problem.A @ z == b], [v, b]
    if problem.G is not None:
        upper = cp.Parameter(len(problem.G))
        rules, parameters = [*rules, problem.G @ z <= upper], [*parameters, upper]
    return cp.Problem(cp.Minimize(objective), rules), parameters, z


_layers: dict[str, CvxpyLayer] = {}  # building a layer is a user's one-off cost, so it is kept


def _layer(problem: Problem, settings: dict[str, Any]) -> CvxpyLayer:
    key = repr((problem.family, problem.A.shape, problem.temperature, settings))
    if key not in _layers:
        arguments = {name: value for name, value in settings.items() if name != "solver"}
        program, parameters, z = _program(problem)
        _layers[key] = CvxpyLayer(
            program, parameters, [z], solver=settings.get("solver"), solver_args=arguments
        )
    return _layers[key]


def _prepare(problem: Problem, settings: dict[str, Any]) -> Call:
    if settings.get("mode") == "dense" and problem.A.shape[1] > DENSE_LIMIT:
        raise ValueError("a dense derivative of this size does not end")
    layer, b = _layer(problem, settings), torch.tensor(problem.b_rows.copy())
    sides = [] if problem.G is None else [torch.tensor(problem.upper_rows.copy())]
    return torch_call(problem, lambda v: layer(v, b, *sides)[0])


def _clarabel(tolerance: float) -> dict[str, Any]:
    names = ("tol_gap_abs", "tol_gap_rel", "tol_feas")
    return {"solve_method": "Clarabel", **dict.fromkeys(names, tolerance)}


def _moreau(tolerance: float) -> dict[str, Any]:
    names = ("tol_gap_abs", "tol_gap_rel", "tol_feas")
    return {"solver": "MOREAU", "ipm_settings": dict.fromkeys(names, tolerance)}


def _both_modes(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """diffcp's derivative by LSQR, its default, or by a dense factorisation."""
    return settings + [{**setting, "mode": "dense"} for setting in settings]


SCS_TIGHT = _both_modes([{"eps": tolerance} for tolerance in TIGHT[:5]])
CLARABEL_TIGHT = _both_modes([_clarabel(tolerance) for tolerance in TIGHT[1:]])
MOREAU_TIGHT = [_moreau(tolerance) for tolerance in TIGHT]

VARIANTS = {
    "cvxpylayers SCS default": Variant(_prepare, [{}], FAMILIES),
    "cvxpylayers SCS tight": Variant(_prepare, SCS_TIGHT, FAMILIES),
    "cvxpylayers Clarabel default": Variant(_prepare, [{"solve_method": "Clarabel"}], FAMILIES),
    "cvxpylayers Clarabel tight": Variant(_prepare, CLARABEL_TIGHT, FAMILIES),
    "cvxpylayers Moreau default": Variant(_prepare, [{"solver": "MOREAU"}], FAMILIES),
    "cvxpylayers Moreau tight": Variant(_prepare, MOREAU_TIGHT, FAMILIES),
}


def _versions() -> dict[str, str]:
    names = ("cvxpylayers", "cvxpy", "diffcp", "scs", "clarabel", "moreau", "torch")
    return {name: version(name) for name in names}


if __name__ == "__main__":
    main(VARIANTS, _versions)

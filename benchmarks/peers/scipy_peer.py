"""SciPy: the loop over samples one would write, on the dual; implicit gradient in NumPy."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special

from peers.protocol import Call, Variant, main
from problems import Array, Problem
from reference import independent_rows

_TIGHTEST = [1e-10, 1e-12, 1e-14, 1e-15]


def _activation(name: str) -> tuple[Callable, Callable, Callable]:
    """φ, σ and σ' as a function of z."""
    if name == "exp":
        return (np.exp, np.exp, lambda z: z)
    return lambda u: np.logaddexp(0, u), scipy.special.expit, lambda z: z * (1 - z)


def _one(v: Array, A: Array, b: Array, activation: tuple, settings: dict[str, Any]) -> Array:
    """λ of one sample."""
    phi, sigma, slope = activation
    start = np.zeros(len(A))
    options = {name: value for name, value in settings.items() if name != "function"}

    def residual(x: Array) -> Array:
        return A @ sigma(v + x @ A) - b

    if settings["function"] == "root":
        return scipy.optimize.root(
            residual, start, jac=lambda x: (A * slope(sigma(v + x @ A))) @ A.T, **options
        ).x
    return scipy.optimize.minimize(
        lambda x: phi(v + x @ A).sum() - b @ x, start, jac=residual, **options
    ).x


def _prepare(problem: Problem, settings: dict[str, Any]) -> Call:
    keep = independent_rows(problem.A)
    A, b, v = problem.A[keep], problem.b_rows[:, keep], problem.v / problem.temperature
    activation = _activation(problem.activation)

    def forward() -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            multipliers = [_one(*row, activation, settings) for row in _rows(v, A, b)]
            return activation[1](v + np.stack(multipliers) @ A)

    def backward(z: Array) -> Array:
        gradient = np.empty_like(z)
        for i, (weight, g) in enumerate(zip(activation[2](z), problem.g, strict=True)):
            s = np.linalg.lstsq((A * weight) @ A.T, A @ (weight * g), rcond=None)[0]
            gradient[i] = weight * (g - s @ A) / problem.temperature
        return gradient

    return Call(forward, backward, lambda z, gradient: (z, gradient))


def _rows(v: Array, A: Array, b: Array) -> list[tuple[Array, Array, Array]]:
    return [(row, A, target) for row, target in zip(v, b, strict=True)]


_FAMILIES = ("sigmoid", "cover", "nonnegative", "doubly_stochastic")
VARIANTS = {
    "SciPy root default": Variant(_prepare, [{"function": "root"}], _FAMILIES),
    "SciPy root tight": Variant(
        _prepare, [{"function": "root", "tol": tolerance} for tolerance in _TIGHTEST], _FAMILIES
    ),
    "SciPy minimize default": Variant(_prepare, [{"function": "minimize"}], _FAMILIES),
    "SciPy minimize tight": Variant(
        _prepare, [{"function": "minimize", "tol": tolerance} for tolerance in _TIGHTEST], _FAMILIES
    ),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {"scipy": version("scipy")})

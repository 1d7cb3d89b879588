"""An independent answer, accurate beyond float64, to measure every error against.

Damped Newton on the dual in float64 brings λ close; then Newton steps with the residual evaluated
in extended precision (and the float64 Hessian) refine it, so z is right to about the last digit of
float64 even where A is badly conditioned. The gradient's linear system is refined the same way.
It shares no code with the library or with the peers and makes no attempt to be fast.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from problems import Array, Problem

Long = NDArray[np.longdouble]


def independent_rows(A: Array) -> NDArray[np.intp]:
    """Indices of a largest set of linearly independent rows, earlier rows first."""
    diagonal = np.abs(np.diag(np.linalg.qr(A.T)[1]))
    return np.flatnonzero(diagonal > 1e-10 * diagonal.max())


def _sigma(activation: str, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """σ(u) and σ'(u), in the precision of ``u``."""
    if activation == "linear":
        return u, np.ones_like(u)
    if activation == "exp":
        z = np.exp(np.minimum(u, 700))
        return z, z
    small = np.exp(-np.abs(u))
    z = np.where(u >= 0, 1, small) / (1 + small)
    return z, small / (1 + small) ** 2


def _phi(activation: str, u: Array) -> Array:
    """The antiderivative of σ."""
    if activation == "linear":
        return u * u / 2
    return np.exp(np.minimum(u, 700)) if activation == "exp" else np.logaddexp(0, u)


def _hessian(A: Array, slope: Array) -> Array:
    """A diag(σ') Aᵀ for each sample."""
    return np.stack([(A * s) @ A.T for s in slope])


def _start(activation: str, v: Array, A: Array, b: Array) -> Array:
    """λ by damped Newton in float64, down to where the dual stops falling."""
    multipliers = np.zeros_like(b)
    if activation == "exp" and (A == 1).any(axis=0).all():
        # Many exp problems start far off (every u below 0); normalising the first rows helps.
        multipliers[:, 0] = -v.max(axis=1)
        multipliers[:, 1:] = np.where(A[1:].sum(1) == A[0].sum(), multipliers[:, :1], 0)
    damping = np.ones(len(b))

    def dual(x: Array) -> Array:
        return _phi(activation, v + x @ A).sum(axis=1) - (x * b).sum(axis=1)

    value = dual(multipliers)
    for _ in range(500):
        z, slope = _sigma(activation, v + multipliers @ A)
        gradient = z @ A.T - b
        if np.abs(gradient).max() < 1e-9:
            break
        hessian = _hessian(A, slope)
        trace = np.trace(hessian, axis1=1, axis2=2) / len(A)
        hessian += (1e-14 * trace + 1e-280)[:, None, None] * np.eye(len(A))
        step = np.linalg.solve(hessian, -gradient[..., None])[..., 0]
        decrease = np.minimum((step * gradient).sum(axis=1), 0)
        damping = np.minimum(1, 4 * damping)
        for _ in range(60):
            trial = dual(multipliers + damping[:, None] * step)
            slack = 1e-13 * (1 + np.abs(value))
            good = trial <= value + 1e-4 * damping * decrease + slack
            if good.all():
                break
            damping = np.where(good, damping, damping / 2)
        multipliers = multipliers + damping[:, None] * step
        value = dual(multipliers)
    return multipliers


def solve(problem: Problem) -> tuple[Array, Array]:
    """z and the gradient of Σ g∘z in v, for every sample of ``problem``."""
    keep = independent_rows(problem.A)
    A, b = problem.A[keep], problem.b_rows[:, keep]
    v = problem.v.astype(np.longdouble) / problem.temperature
    long_A, g = A.astype(np.longdouble), problem.g.astype(np.longdouble)
    multipliers: Long = _start(problem.activation, v.astype(float), A, b).astype(np.longdouble)
    for _ in range(4):
        z, slope = _sigma(problem.activation, v + multipliers @ long_A)
        gradient = (z @ long_A.T - b).astype(float)
        hessian = _hessian(A, slope.astype(float))
        multipliers -= np.linalg.solve(hessian, gradient[..., None])[..., 0]
    z, slope = _sigma(problem.activation, v + multipliers @ long_A)
    residual = np.abs(z @ long_A.T - b).max()
    if not residual < 1e-13 * (1 + np.abs(b).max()):
        raise RuntimeError(f"the reference did not converge: residual {residual:.1e}")
    hessian, s = _hessian(A, slope.astype(float)), np.zeros_like(multipliers)
    for _ in range(3):  # H s = A (σ'∘g), refined: what is left is A (σ'∘(g − Aᵀs))
        left = ((slope * (g - s @ long_A)) @ long_A.T).astype(float)
        s = s + np.linalg.solve(hessian, left[..., None])[..., 0]
    gradient = slope * (g - s @ long_A) / problem.temperature
    return z.astype(float), gradient.astype(float)


def solve_within(problem: Problem) -> tuple[Array, Array]:
    """`solve` with inequalities: the active ones of each sample are found, and are equations then.

    A bounded quasi-Newton method on the dual suggests which are active; rows are added and dropped
    until the conditions of optimality hold.
    """
    found = [_one_within(problem.rows(i + 1), i) for i in range(len(problem.v))]
    return tuple(np.stack(x) for x in zip(*found, strict=True))


def _one_within(problem: Problem, i: int) -> tuple[Array, Array]:
    v, b, g = problem.v[i], problem.b_rows[i], problem.g[i]
    G, upper, count = problem.G, problem.upper_rows[i], len(problem.A)
    C, sides = np.concatenate([problem.A, G]), np.concatenate([b, upper])

    def dual(x: Array) -> tuple[float, Array]:
        u = v + x @ C
        return _phi(problem.activation, u).sum() - x @ sides, C @ _sigma(problem.activation, u)[
            0
        ] - sides

    bounds = [(None, None)] * count + [(None, 0.0)] * len(G)
    options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-17, "gtol": 1e-10, "maxcor": 50}
    start = minimize(dual, np.zeros(len(C)), jac=True, bounds=bounds, options=options).x
    active = start[count:] < -1e-7 * max(1.0, np.abs(start).max())
    for _ in range(30):
        rows = np.concatenate([np.arange(count), count + np.flatnonzero(active)])
        part = replace(
            problem, v=v[None], g=g[None], A=C[rows], b=sides[rows][None], G=None, upper=None
        )
        z, gradient = solve(part)
        u = _inverse(problem.activation, z[0]) - v
        multipliers = np.linalg.lstsq(C[rows].T, u, rcond=None)[0][count:]
        wrong = np.zeros(len(G), bool)
        wrong[np.flatnonzero(active)[multipliers > 0]] = True
        broken = ~active & (G @ z[0] - upper > 1e-11 * (1 + np.abs(upper)))
        if not (wrong | broken).any():
            return z[0], gradient[0]
        active = (active & ~wrong) | broken
    raise RuntimeError(f"no active rows were found for sample {i} of {problem.family}")


def _inverse(activation: str, z: Array) -> Array:
    if activation == "linear":
        return z
    return np.log(z) if activation == "exp" else np.log(z) - np.log1p(-z)


def checked_rows(problem: Problem) -> int:
    """How many of the first samples the error columns look at."""
    if problem.G is not None:
        return min(len(problem.v), 16)
    return min(len(problem.v), 256, 2**18 // problem.A.shape[1])


def errors(
    problem: Problem, z: Array, gradient: Array, right: tuple[Array, Array] | None = None
) -> dict[str, float]:
    """Largest errors over the samples given, as the tables report them.

    z's is absolute; the gradient's is relative to its largest entry in the sample, or to 1 if that
    is smaller, since a cold softmax has gradients of the order 1/τ.
    """
    few = problem.rows(len(z))
    chosen = solve if problem.G is None else solve_within
    right_z, right_gradient = (array[: len(z)] for array in right or chosen(few))
    scale = np.maximum(1, np.abs(right_gradient).max(axis=1, keepdims=True))
    return {
        "error_z": float(np.abs(z - right_z).max()),
        "error_gradient": float((np.abs(gradient - right_gradient) / scale).max()),
        "residual": max(float(np.abs(z @ few.A.T - few.b_rows).max()), _violation(few, z)),
    }


def _violation(problem: Problem, z: Array) -> float:
    return 0.0 if problem.G is None else float((z @ problem.G.T - problem.upper_rows).max())

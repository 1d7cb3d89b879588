"""PiNet (JAX): Douglas–Rachford, so many steps forward, and so many of another solver backward."""

from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pinet import (
    AffineInequalityConstraint,
    EqualityConstraint,
    EqualityConstraintsSpecification,
    Project,
    ProjectionInstance,
)

from peers.protocol import Call, Variant, main
from problems import Problem


def _prepare(problem: Problem, settings: dict[str, Any]) -> Call:
    single = settings.get("dtype") == "float32"
    jax.config.update("jax_enable_x64", not single)
    dtype = jnp.float32 if single else jnp.float64
    options = {name: value for name, value in settings.items() if name != "dtype"}
    A, G = (jnp.asarray(x, dtype)[None] for x in (problem.A, problem.G))
    b, upper = (jnp.asarray(x, dtype)[..., None] for x in (problem.b_rows, problem.upper_rows))
    equal = EqualityConstraint(A, b[:1], method=None, var_b=True)
    below = AffineInequalityConstraint(G, jnp.full_like(upper[:1], -1e20), upper[:1])
    layer = Project(equal, below)
    v, g = (jnp.asarray(x, dtype)[..., None] for x in (problem.v, problem.g))

    def solve(v: jax.Array) -> jax.Array:
        given = ProjectionInstance(x=v, eq=EqualityConstraintsSpecification(b=b))
        return layer.call(y_raw=given, **options)[0].x

    # The forward pass hands its residuals to the backward pass, as in a training step.
    forward = jax.jit(lambda v: jax.vjp(solve, v))
    backward = jax.jit(lambda solution: solution[1](g)[0])
    return Call(
        lambda: jax.block_until_ready(forward(v)),
        lambda solution: backward(solution).block_until_ready(),
        lambda solution, gradient: (
            np.asarray(solution[0], np.float64)[..., 0],
            np.asarray(gradient, np.float64)[..., 0],
        ),
    )


def _steps(forward: int, backward: int, sigma: float) -> dict[str, Any]:
    return {"n_iter": forward, "n_iter_bwd": backward, "sigma": sigma}


_FAMILY = ("quadratic",)
VARIANTS = {
    "PiNet 50 steps": Variant(_prepare, [_steps(50, 5, 1.0), _steps(50, 5, 3.0)], _FAMILY),
    "PiNet 50 steps float32": Variant(
        _prepare, [{**_steps(50, 5, 3.0), "dtype": "float32"}], _FAMILY
    ),
    "PiNet tight": Variant(
        _prepare, [_steps(200, 100, 3.0), _steps(1000, 100, 1.0), _steps(1000, 300, 3.0)], _FAMILY
    ),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {name: version(name) for name in ("pinet-hcnn", "jax")})

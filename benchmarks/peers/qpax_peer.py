"""qpax (JAX): one interior-point quadratic program, vmapped and jitted; no real inequality."""

from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qpax

from peers.protocol import Call, Variant, main
from problems import Problem

jax.config.update("jax_enable_x64", True)


def _prepare(problem: Problem, settings: dict[str, Any]) -> Call:
    outputs = problem.A.shape[1]
    A, identity = jnp.asarray(problem.A), jnp.eye(outputs)
    v, b, g = (jnp.asarray(array) for array in (problem.v, problem.b_rows, problem.g))
    # qpax requires an inequality: 0ᵀz ≤ 1 never binds.
    G, h = jnp.zeros((1, outputs)), jnp.ones(1)

    def one(v: jax.Array, b: jax.Array) -> jax.Array:
        return qpax.solve_qp_primal(identity, -v, A, b, G, h, **settings)

    # The forward pass hands its residuals to the backward pass, as in a training step.
    forward = jax.jit(lambda v: jax.vjp(lambda x: jax.vmap(one)(x, b), v))
    backward = jax.jit(lambda solution: solution[1](g)[0])
    return Call(
        lambda: jax.block_until_ready(forward(v)),
        lambda solution: backward(solution).block_until_ready(),
        lambda solution, gradient: (np.asarray(solution[0]), np.asarray(gradient)),
    )


_FAMILY = ("linear",)
_TIGHTEST = [
    {"solver_tol": 10.0**-k, "target_kappa": kappa} for k in (10, 12, 14) for kappa in (1e-3, 1e-12)
]
VARIANTS = {
    "qpax default": Variant(_prepare, [{}], _FAMILY),
    "qpax tight": Variant(_prepare, _TIGHTEST, _FAMILY),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {name: version(name) for name in ("qpax", "jax")})

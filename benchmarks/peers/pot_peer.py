"""POT: Sinkhorn's iteration on doubly stochastic matrices, batched and one by one.

M = −v and reg = 1 with unit margins make POT's plan our z. A plan's gradient needs
``grad="autodiff"`` (unrolled) or "last_step" (cheap, approximate); the default, "envelope", gives
the gradient of the value only.
"""

from importlib.metadata import version
from typing import Any

import ot
import ot.batch
import torch

from peers.protocol import Call, Variant, main
from peers.torch_call import torch_call
from problems import Problem

MEMORY = 6e9  # bytes for the unrolled iterations


def _prepare_batch(problem: Problem, settings: dict[str, Any]) -> Call:
    n = problem.side
    ones = torch.ones(len(problem.v), n, dtype=torch.float64)

    def solve(v: torch.Tensor) -> torch.Tensor:
        cost = -v.reshape(-1, n, n)
        return ot.batch.solve_batch(cost, 1.0, ones, ones, **settings).plan.reshape(v.shape)

    return torch_call(problem, solve)


def _prepare_loop(problem: Problem, settings: dict[str, Any]) -> Call:
    n = problem.side
    ones = torch.ones(n, dtype=torch.float64)

    def solve(v: torch.Tensor) -> torch.Tensor:
        costs = -v.reshape(-1, n, n)
        plans = [ot.sinkhorn(ones, ones, cost, 1.0, warn=False, **settings) for cost in costs]
        return torch.stack(plans).reshape(v.shape)

    return torch_call(problem, solve)


def _unrolled_rows(problem: Problem) -> int:
    """Rows whose unrolled graph fits: about four n × n arrays per iteration, 150 iterations."""
    return int(MEMORY / (8 * 4 * 150 * problem.side**2))


def _batch(*tolerances: float, method: str = "auto", grad: str = "autodiff") -> list[dict]:
    common = {"max_iter": 100_000, "method": method, "grad": grad}
    return [{"tol": tolerance, **common} for tolerance in tolerances]


_FAMILY = ("doubly_stochastic",)
_TIGHTEST = (1e-12, 1e-13, 1e-14)
VARIANTS = {
    "POT ot.batch default": Variant(
        _prepare_batch, [{"grad": "autodiff"}], _FAMILY, _unrolled_rows
    ),
    "POT ot.batch 1e-10": Variant(_prepare_batch, _batch(1e-10), _FAMILY, _unrolled_rows),
    "POT ot.batch 1e-10 sinkhorn": Variant(
        _prepare_batch, _batch(1e-10, method="sinkhorn"), _FAMILY, _unrolled_rows
    ),
    "POT ot.batch 1e-10 last_step": Variant(
        _prepare_batch, _batch(1e-10, grad="last_step"), _FAMILY, _unrolled_rows
    ),
    "POT ot.batch tight": Variant(_prepare_batch, _batch(*_TIGHTEST), _FAMILY, _unrolled_rows),
    "POT ot.sinkhorn default": Variant(_prepare_loop, [{}], _FAMILY, _unrolled_rows),
    "POT ot.sinkhorn tight": Variant(
        _prepare_loop,
        [{"stopThr": tolerance, "numItermax": 100_000} for tolerance in _TIGHTEST],
        _FAMILY,
        _unrolled_rows,
    ),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {name: version(name) for name in ("POT", "torch")})

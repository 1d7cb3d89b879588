"""qpth: batched interior-point quadratic programs, with inequalities or with none that binds."""

from importlib.metadata import version
from typing import Any

import torch
from qpth.qp import QPFunction

from peers.protocol import Call, Variant, main
from peers.torch_call import torch_call
from problems import Problem


def _prepare(problem: Problem, settings: dict[str, Any]) -> Call:
    outputs = problem.A.shape[1]
    A, b = torch.tensor(problem.A), torch.tensor(problem.b_rows.copy())
    identity = torch.eye(outputs, dtype=torch.float64)
    if problem.G is None:  # qpth requires an inequality: 0ᵀz ≤ 1 never binds
        G, h = torch.zeros(1, outputs, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    else:
        G, h = torch.tensor(problem.G), torch.tensor(problem.upper)
    function = QPFunction(verbose=-1, check_Q_spd=False, **settings)
    return torch_call(problem, lambda v: function(identity, -v, G, h, A, b))


_FAMILY = ("linear", "quadratic")
VARIANTS = {
    "qpth default": Variant(_prepare, [{}], _FAMILY),
    "qpth tight": Variant(
        _prepare, [{"eps": 10.0**-k, "maxIter": 50} for k in (13, 14, 15, 16)], _FAMILY
    ),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {name: version(name) for name in ("qpth", "torch", "numpy")})

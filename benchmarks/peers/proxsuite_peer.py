"""proxsuite's QPLayer: an augmented-Lagrangian quadratic program for each sample, in threads."""

from importlib.metadata import version
from typing import Any

import torch
from proxsuite.torch.qplayer import QPFunction

from peers.protocol import Call, Variant, main
from peers.torch_call import torch_call
from problems import Problem


def _prepare(problem: Problem, settings: dict[str, Any]) -> Call:
    A, G = torch.tensor(problem.A), torch.tensor(problem.G)
    b, upper = torch.tensor(problem.b_rows.copy()), torch.tensor(problem.upper_rows.copy())
    identity = torch.eye(A.shape[1], dtype=torch.float64)
    lower = torch.full_like(upper, -1e20)
    options = {"omp_parallel": torch.get_num_threads() > 1, **settings}
    function = QPFunction(structural_feasibility=True, **options)
    return torch_call(problem, lambda v: function(identity, -v, A, b, G, lower, upper)[0])


VARIANTS = {
    "proxsuite default": Variant(_prepare, [{}], ("quadratic",)),
    "proxsuite tight": Variant(_prepare, [{"eps": 1e-9}, {"eps": 1e-12}], ("quadratic",)),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {name: version(name) for name in ("proxsuite", "torch")})

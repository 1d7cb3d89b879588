"""LinSATNet: multi-set Sinkhorn for x in [0, 1] with non-negative constraints, equality form.

Its stopping rule is fixed (|log A_j x − log b_j| < 1e-3 for all samples, at most ``max_iter``
rounds), so its tightest is the same rule with rounds enough. With its default, ``grouped=True``,
version 0.1.3 counts satisfied constraints wrongly and never stops before ``max_iter`` (100), so the
tight variant is ungrouped, where the rule works. Its input is scaled by its
temperature, so that x/τ = v at its own default τ = 0.05. One ``b`` serves the whole batch.

What it approaches is σ(v + Pᵀμ) with P the 0/1 pattern of A: our z when A is 0/1, a feasible point
that is not the projection otherwise (see ``problems.cover`` and ``problems.nonnegative``).
"""

from importlib.metadata import version
from typing import Any

import torch
from LinSATNet import init_constraints, linsat_layer

from peers.protocol import Call, Variant, main
from peers.torch_call import torch_call
from problems import Problem

TAU = 0.05
FAMILIES = ("cover", "nonnegative", "doubly_stochastic_sigmoid", "cover_within")


def _prepare(problem: Problem, settings: dict[str, Any]) -> Call:
    dtype = torch.float32 if settings["dtype"] == "float32" else torch.float64
    options = {name: value for name, value in settings.items() if name != "dtype"}
    E, f = torch.tensor(problem.A, dtype=dtype), torch.tensor(problem.b, dtype=dtype)
    torch.set_default_dtype(dtype)  # its absent inequalities are made in the default dtype
    grouped = options.get("grouped", True)
    sides = {}
    if problem.G is not None:  # its rows are not negative: those of ≥ are turned around again
        G, upper = torch.tensor(problem.G, dtype=dtype), torch.tensor(problem.upper, dtype=dtype)
        above = G.sum(-1) < 0
        sides = {"A": G[~above], "b": upper[~above], "C": -G[above], "d": -upper[above]}
    constraints = init_constraints(E.shape[1], **sides, E=E, f=f, grouped=grouped)

    def solve(v: torch.Tensor) -> torch.Tensor:
        return linsat_layer(TAU * v, constr_dict=constraints, tau=TAU, no_warning=True, **options)

    return torch_call(problem, solve, dtype)


def _memory_rows(problem: Problem) -> int:
    """Rows whose unrolled graph stays within about 4 GB at 300 rounds."""
    return max(1, int(4e9 / (8 * 8 * 300 * problem.A.sum().astype(int))))


VARIANTS = {
    "LinSATNet default": Variant(_prepare, [{"dtype": "float64"}], FAMILIES, _memory_rows),
    "LinSATNet default float32": Variant(_prepare, [{"dtype": "float32"}], FAMILIES, _memory_rows),
    "LinSATNet tight": Variant(
        _prepare,
        [{"dtype": "float64", "max_iter": 10_000, "grouped": False}],
        FAMILIES,
        _memory_rows,
    ),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {name: version(name) for name in ("LinSATNet", "torch")})

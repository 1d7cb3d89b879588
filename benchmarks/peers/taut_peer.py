"""``taut`` itself, under the same rules as its peers."""

from typing import Any

import torch

import taut
from peers.protocol import Call, Variant, main
from peers.torch_call import torch_call
from problems import FAMILIES, Problem


def _activation(problem: Problem) -> "taut.Activation | str":
    if problem.temperature == 1:
        return problem.activation
    return taut.activations.tempered(problem.activation, problem.temperature)


def _prepare(problem: Problem, settings: dict[str, Any]) -> Call:
    dtype = torch.float32 if settings["dtype"] == "float32" else torch.float64
    A, b = torch.tensor(problem.A, dtype=dtype), torch.tensor(problem.b, dtype=dtype)
    activation = _activation(problem)
    if problem.G is not None:
        G, upper = (torch.tensor(x, dtype=dtype) for x in (problem.G, problem.upper))
        if settings["call"] == "Projection":
            layer = taut.Projection(A, G=G, activation=activation)
            return torch_call(problem, lambda v: layer(v, b, upper=upper), dtype)
        options = {"G": G, "upper": upper, "activation": activation}
        return torch_call(problem, lambda v: taut.project(v, A, b, **options).z, dtype)
    if settings["call"] == "Projection":
        layer = taut.Projection(A, activation=activation)
        return torch_call(problem, lambda v: layer(v, b), dtype)
    return torch_call(problem, lambda v: taut.project(v, A, b, activation=activation).z, dtype)


_ALL = tuple(FAMILIES)
VARIANTS = {
    "taut": Variant(_prepare, [{"call": "project", "dtype": "float64"}], _ALL),
    "taut Projection": Variant(_prepare, [{"call": "Projection", "dtype": "float64"}], _ALL),
    "taut float32": Variant(_prepare, [{"call": "project", "dtype": "float32"}], _ALL),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {"taut": taut.__version__, "torch": torch.__version__})

"""The floor: closed forms in plain torch, where there is one (linear, and a single softmax)."""

from importlib.metadata import version
from typing import Any

import torch

from peers.protocol import Call, Variant, main
from peers.torch_call import torch_call
from problems import Problem


def _factored(problem: Problem, settings: dict[str, Any]) -> Call:
    """z = v + Aᵀ(AAᵀ)⁻¹(b − A v), factorising AAᵀ at every call or, once, beforehand."""
    A, b = torch.tensor(problem.A), torch.tensor(problem.b_rows.copy())
    kept = torch.linalg.cholesky(A @ A.T)

    def solve(v: torch.Tensor) -> torch.Tensor:
        factor = kept if settings["keep"] else torch.linalg.cholesky(A @ A.T)
        return v + torch.cholesky_solve((b - v @ A.T).T, factor).T @ A

    return torch_call(problem, solve)


def _softmax(problem: Problem, settings: dict[str, Any]) -> Call:
    return torch_call(problem, lambda v: torch.softmax(v / problem.temperature, dim=1))


VARIANTS = {
    "torch closed form": Variant(_factored, [{"keep": False}], ("linear",)),
    "torch closed form, factor kept": Variant(_factored, [{"keep": True}], ("linear",)),
    "torch softmax": Variant(_softmax, [{}], ("softmax",)),
}


if __name__ == "__main__":
    main(VARIANTS, lambda: {"torch": version("torch")})

"""Turn a differentiable torch function of v into a timed ``Call``."""

from collections.abc import Callable

import torch

from peers.protocol import Call
from problems import Problem


def torch_call(
    problem: Problem,
    solve: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype = torch.float64,
) -> Call:
    """``solve`` maps v (N, K) to z (N, K); the loss is Σ g∘z, its gradient is taken in v."""
    v = torch.tensor(problem.v, dtype=dtype, requires_grad=True)
    g = torch.tensor(problem.g, dtype=dtype)

    def forward() -> torch.Tensor:
        return solve(v)

    def backward(z: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(z, v, g)[0]

    return Call(
        forward,
        backward,
        lambda z, gradient: (z.detach().double().numpy(), gradient.double().numpy()),
    )

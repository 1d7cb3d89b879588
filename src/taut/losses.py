"""The loss matched to the activation (eq. 1 of the paper), up to the constant ψ(y).

ℓ = Σψ(y) − yᵀv − bᵀλ + Σφ(v + Aᵀλ) is B(y‖z) when A y = b: zero if and only if z = y. The
multiplier term is bᵀλ and not yᵀAᵀλ, so the loss stays right when a noisy y violates A y = b.
"""

from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.activation import Activation
from taut.activations import resolve
from taut.autograd import apply
from taut.dual import Dual
from taut.kernel import Kernel, readable
from taut.solution import Solution, Status

Reduction = Literal["mean", "sum", "none"]


def matched_loss(
    solution: Solution, y: Float[Tensor, "*batch K"], reduction: Reduction = "mean"
) -> Float[Tensor, "*rest"]:
    """B(y‖z) summed over outputs; its gradient in v is z − y, with no solver in the backward pass.

    By the envelope theorem the derivative of the solved D is that at fixed λ. A second derivative
    does go through the solver, and is right. `reduction` is over samples.

    >>> import taut
    >>> v = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> solution = taut.project(v, torch.ones(1, 3), torch.ones(1), activation="exp")
    >>> y = torch.tensor([0.0, 0.0, 1.0])
    >>> matched_loss(solution, y)  # cross-entropy
    tensor(0.4076, grad_fn=<MeanBackward0>)
    """
    _check_target(y, solution.z.shape, "solution.z")
    problem = solution.problem
    loss = apply(
        _Matched,
        problem.v,
        problem.A.data,
        problem.b,
        y.to(solution.z.dtype),
        solution.z,
        solution.multipliers,
        solution.u,
        solution.status,
        problem,
        solution.kernel,
        solution.complete,
    )
    return _reduce(loss, reduction)


@final
class _Matched(torch.autograd.Function):
    """ℓ of eq. 1 with the derivatives of the envelope theorem; z and λ come in solved.

    ∂v = z − y,  ∂b = −λ,  ∂A = λ zᵀ,  ∂y = u(y) − v. They depend on z and λ, so a second
    derivative passes through the solver by itself.
    """

    @staticmethod
    def forward(
        v: Tensor,
        data: Tensor,
        b: Tensor,
        y: Tensor,
        z: Tensor,
        multipliers: Tensor,
        u: Tensor,
        status: Tensor,
        problem: Dual,
        kernel: Kernel | None,
        complete: bool,
    ) -> Tensor:
        if kernel is not None and readable(v, b, y, u, multipliers):
            if v.ndim == 2:
                return kernel.loss(v, b, y, u, multipliers)
            v, b, y, u, multipliers = (
                x.reshape(-1, x.shape[-1]) for x in (v, b, y, u, multipliers)
            )
            return kernel.loss(v, b, y, u, multipliers).reshape(problem.v.shape[:-1])
        row = problem.activation
        terms = torch.addcmul(row.psi(y), y, v, value=-1).add_(row.phi(u))
        return terms.sum(-1) - (b * multipliers).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        v, _, _, y, z, multipliers, _, status, problem, _, complete = inputs
        ctx.save_for_backward(v, y, z, multipliers, status)
        ctx.activation, ctx.A, ctx.complete = problem.activation, problem.A, complete

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        v, y, z, multipliers, status = ctx.saved_tensors
        g, needs = grads[0].unsqueeze(-1), ctx.needs_input_grad
        dy = g * (ctx.activation.inverse(y) - v) if needs[3] else None
        if not ctx.complete:
            # Where no z exists there is nothing to learn. An undecided sample still has the
            # gradient of ℓ at its λ: that is how the paper trains with a solver that stops early.
            ok = ((status == Status.CONVERGED) | (status == Status.MAX_ITERATIONS)).unsqueeze(-1)
            g, y, z, multipliers = (torch.where(ok, x, 0) for x in (g, y, z, multipliers))
            dy = None if dy is None else torch.where(ok, dy, 0)
        dv = g * (z - y)
        dA = ctx.A.outer(g * multipliers, z) if needs[1] else None
        db = -g * multipliers if needs[2] else None
        return dv, dA, db, dy, None, None, None, None, None, None, None


def bregman_loss(
    u: Float[Tensor, "*batch K"],
    y: Float[Tensor, "*batch K"],
    activation: str | Activation,
    reduction: Reduction = "mean",
) -> Float[Tensor, "*rest"]:
    """B(y‖σ(u)) of any linear predictor u: what jointly trained or predicted multipliers use.

    >>> u, y = torch.tensor([0.3, -1.0]), torch.tensor([1.0, 0.0])
    >>> loss = bregman_loss(u, y, "sigmoid")
    >>> bce = torch.nn.functional.binary_cross_entropy_with_logits(u, y, reduction="sum")
    >>> torch.testing.assert_close(loss, bce)
    """
    _check_target(y, u.shape, "u")
    return _reduce(resolve(activation).divergence(y.to(u.dtype), u).sum(-1), reduction)


def _check_target(y: Tensor, shape: torch.Size, name: str) -> None:
    if y.shape != shape:
        raise ValueError(f"y must have the shape of {name}, {tuple(shape)}; got {tuple(y.shape)}.")


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none"; got {reduction!r}.')
    return loss if reduction == "none" else getattr(loss, reduction)()

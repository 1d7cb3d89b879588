"""The loss matched to the activation (eq. 1 of the paper), up to the constant ψ(y).

ℓ = Σψ(y) − yᵀv − bᵀλ + Σφ(v + Aᵀλ) is B(y‖z) when A y = b: zero if and only if z = y. The
multiplier term is bᵀλ and not yᵀAᵀλ, so the loss stays right when a noisy y violates A y = b.
"""

from math import isnan
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from taut import compiled
from taut.accept import Numbers, as_floating
from taut.activations import Activation, resolve
from taut.autograd import check_followed, check_recorded, recording, transforming, uncompiled
from taut.matched import Matched, matched, warn_of_failures
from taut.pose import check_range
from taut.solution import Solution, check_unwritten
from taut.targets import check_targets, look

Reduction = Literal["mean", "sum", "none"]


def matched_loss(
    solution: Solution, y: Float[Tensor, "*batch K"] | Numbers, reduction: Reduction = "mean"
) -> Float[Tensor, "*rest"]:
    """B(y‖z) summed over outputs; its gradient in v is z − y, with no solver in the backward pass.

    By the envelope theorem the derivative of the solved D is that at fixed λ. A second derivative
    does go through the solver, and is right. `reduction` is over samples.

    It is B(y‖z) where A y = b. Where y does not satisfy the equations it differs by (b − A y)ᵀλ,
    which has no lower bound: `reconcile` such targets first. A `FailureWarning` says so where the
    first targets of a layer, or of a `Prepared`, are plainly off; beside h also, once, where a loss
    is below 0, as z is not the nearest then. To learn A or b, take another loss of
    z, or `bregman_loss(solution.u, y, activation)`.

    >>> import taut
    >>> v = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> solution = taut.project(v, torch.ones(1, 3), torch.ones(1), activation="exp")
    >>> y = torch.tensor([0.0, 0.0, 1.0])
    >>> matched_loss(solution, y)  # cross-entropy
    tensor(0.4076, grad_fn=<MeanBackward0>)
    """
    if not torch.compiler.is_compiling() and recording():
        check_recorded()
    if not isinstance(solution, Solution):
        raise TypeError(
            f"matched_loss needs a Solution; got {type(solution).__name__}. Use layer.solve(v, b) "
            "instead of layer(v, b), or what taut.project returns."
        )
    if not isinstance(y, Tensor) or y.dtype.is_complex:
        y = as_floating("y", y, solution.z.dtype, solution.z.device)
    if y.shape != solution.z.shape:
        raise _misshapen(y, solution.z.shape, "solution.z")
    if torch.compiler.is_compiling():
        reason = compiled.unfit(solution)
        if reason is not None:
            return uncompiled(matched_loss, reason)(solution, y, reduction)
        flat = y.to(solution.z.dtype).reshape(solution._outcome.z.shape)
        loss = compiled.matched_loss(solution, flat)
        return reduced(loss.reshape(solution.status.shape), reduction)
    check_unwritten(solution)
    problem, outcome = solution._problem, solution._outcome
    y, shape = y.to(solution.z.dtype), solution.status.shape
    flat = y if y.ndim == 2 else y.reshape(outcome.z.shape)
    found = outcome.z, outcome.multipliers, outcome.u, outcome.status
    known = outcome.failed == 0 and not outcome.held
    if transforming():
        loss = Matched.apply(problem, known, None, flat, *found, *problem.inputs)
    else:
        loss = matched(problem, known, found, flat, None, None, None, None, *problem.inputs)
    if outcome.failed > 0:
        warn_of_failures(solution.status)
    each, loss = loss, reduced(loss if len(shape) == 1 else loss.reshape(shape), reduction)
    if not transforming() and isnan((loss.sum() if loss.ndim else loss).item()):
        check_targets(y, solution.status, problem.prepared.activation)
    if problem.prepared.unsaid and not transforming():
        look(problem, flat, solution.status, each)
    return loss


def bregman_loss(
    u: Float[Tensor, "*batch K"],
    y: Float[Tensor, "*batch K"],
    activation: str | Activation,
    reduction: Reduction = "mean",
) -> Float[Tensor, "*rest"]:
    """B(y‖σ(u)) of any linear predictor u: what jointly trained or predicted multipliers use.

    In the dtype of u; in float32 where that is half precision.

    >>> u, y = torch.tensor([0.3, -1.0]), torch.tensor([1.0, 0.0])
    >>> loss = bregman_loss(u, y, "sigmoid")
    >>> bce = torch.nn.functional.binary_cross_entropy_with_logits(u, y, reduction="sum")
    >>> torch.testing.assert_close(loss, bce)
    """
    check_followed()
    u = as_floating("u", u, None)
    if not isinstance(y, Tensor) or y.dtype.is_complex:
        y = as_floating("y", y, u.dtype, u.device)
    if y.shape != u.shape:
        raise _misshapen(y, u.shape, "u")
    activation, y = resolve(activation), y.to(u.dtype)
    loss = reduced(activation.divergence(y, u).sum(-1), reduction)
    if not transforming() and isnan(loss.sum().item()):
        check_range("targets", y, activation)
    return loss


def _misshapen(y: Tensor, shape: torch.Size, name: str) -> ValueError:
    hint = ""
    if y.shape == shape[:-1] and y.ndim:
        own = "y" if y.dtype is torch.long else "y.long()"
        hint = (
            " If these are the numbers of classes, pass "
            f"torch.nn.functional.one_hot({own}, {shape[-1]}).to(v.dtype)."
        )
    found = f"y must have the shape of {name}, {tuple(shape)}; got {tuple(y.shape)}.{hint}"
    return ValueError(found)


def reduced(loss: Tensor, reduction: str) -> Tensor:
    """The mean or the sum of the losses of all samples, or those themselves."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none"; got {reduction!r}.')
    return loss if reduction == "none" else getattr(loss, reduction)()

"""The loss matched to the activation (eq. 1 of the paper), up to the constant ψ(y).

ℓ = Σψ(y) − yᵀv − bᵀλ + Σφ(v + Aᵀλ) is B(y‖z) when A y = b: zero if and only if z = y. The
multiplier term is bᵀλ and not yᵀAᵀλ, so the loss stays right when a noisy y violates A y = b.
"""

import warnings
from math import isnan
from typing import Any, Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.accept import Numbers, as_floating
from taut.activations import Activation, resolve
from taut.autograd import direct, lead, transforming, uncompiled
from taut.outcome import FailureWarning, Status
from taut.pose import check_range
from taut.problems import Problem
from taut.solution import Solution, check_unwritten

Reduction = Literal["mean", "sum", "none"]


def matched_loss(
    solution: Solution, y: Float[Tensor, "*batch K"] | Numbers, reduction: Reduction = "mean"
) -> Float[Tensor, "*rest"]:
    """B(y‖z) summed over outputs; its gradient in v is z − y, with no solver in the backward pass.

    By the envelope theorem the derivative of the solved D is that at fixed λ. A second derivative
    does go through the solver, and is right. `reduction` is over samples.

    It is B(y‖z) where A y = b. Where y does not satisfy the equations it differs by (b − A y)ᵀλ,
    which has no lower bound: `reconcile` such targets first. To learn A or b, take another loss of
    z, or `bregman_loss(solution.u, y, activation)`.

    >>> import taut
    >>> v = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> solution = taut.project(v, torch.ones(1, 3), torch.ones(1), activation="exp")
    >>> y = torch.tensor([0.0, 0.0, 1.0])
    >>> matched_loss(solution, y)  # cross-entropy
    tensor(0.4076, grad_fn=<MeanBackward0>)
    """
    if torch.compiler.is_compiling():
        return uncompiled(matched_loss)(solution, y, reduction)
    if not isinstance(solution, Solution):
        raise TypeError(
            f"matched_loss needs a Solution; got {type(solution).__name__}. Use layer.solve(v, b) "
            "instead of layer(v, b), or what taut.project returns."
        )
    if not isinstance(y, Tensor):
        y = as_floating("y", y, solution.z.dtype, solution.z.device)
    if y.shape != solution.z.shape:
        raise _misshapen(y, solution.z.shape, "solution.z")
    check_unwritten(solution)
    problem, outcome = solution._problem, solution._outcome
    y, shape = y.to(solution.z.dtype), solution.status.shape
    flat = y if y.ndim == 2 else y.reshape(outcome.z.shape)
    found = outcome.z, outcome.multipliers, outcome.u, outcome.status
    known = outcome.failed == 0 and not outcome.held
    if transforming():
        loss = _Matched.apply(problem, known, None, flat, *found, *problem.inputs)
    else:
        loss = _matched(problem, known, found, flat, None, None, None, None, *problem.inputs)
    if outcome.failed > 0:
        _warn(solution.status)
    loss = _reduce(loss if len(shape) == 1 else loss.reshape(shape), reduction)
    if not transforming() and (not known or isnan((loss.sum() if loss.ndim else loss).item())):
        activation = problem.prepared.activation
        # Samples that fail have no loss, whatever their target.
        inside = activation.sigma(torch.zeros_like(y))
        y = torch.where(_learnable(solution.status).unsqueeze(-1), y, inside)
        check_range("targets", y, activation)
    return loss


@final
class _Matched(torch.autograd.Function):
    """ℓ = Σψ(y) − yᵀv + D(λ) with the derivatives of the envelope theorem.

    ∂y = u(y) − v, ∂v = z − y, and for the other inputs those of D at fixed λ. They depend on z
    and λ, which come in solved, so a second derivative passes through the solver by itself.
    They are arguments for torch.func, which must see every tensor. Elsewhere they come as `found`,
    and the first derivative does not even visit the solve.
    """

    @staticmethod
    def forward(
        kind: Problem,
        complete: bool,  # is it known, without a look, that all have converged, and none is held?
        found: tuple[Tensor, ...] | None,
        y: Tensor,
        z: Any,
        multipliers: Any,
        u: Any,
        status: Any,
        *inputs: Tensor,
    ) -> Tensor:
        problem, v = kind.over(*inputs), inputs[0]
        z, multipliers, u, status = found or (z, multipliers, u, status)
        loss = problem.quick_loss(y, multipliers, u)
        if loss is None:
            loss = _slow_loss(problem, v, y, multipliers, u)
        elif not complete:
            # A backend knows nothing of held outputs; the other samples keep its bits.
            index = u.isinf().any(-1).nonzero().squeeze(-1)
            part = [x[index] for x in (v, y, multipliers, u)]
            loss.index_copy_(0, index, _slow_loss(problem.take(index), *part))
        return loss if complete else torch.where(_learnable(status), loss, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        kind, ctx.complete, found, y, *solved = inputs[:8]
        found, given = found or solved, inputs[8:]
        # v only where it is needed: it may be written to before the backward pass.
        v = given[0] if y.requires_grad else y
        ctx.save_for_backward(y, v, *found, *kind.needed(given))
        ctx.kind, ctx.prepared = type(kind), kind.prepared

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        y, v, z, multipliers, u, status, *needed = ctx.saved_tensors
        if torch.is_autocast_enabled(u.device.type):
            with torch.autocast(u.device.type, enabled=False):
                return _Matched.backward(ctx, *grads)
        needs = ctx.needs_input_grad
        g = grads[0].unsqueeze(-1)
        dy = g * (ctx.prepared.activation.inverse(y) - v) if needs[3] else None
        if not ctx.complete:
            ok = _learnable(status).unsqueeze(-1)
            free = ok & ~u.isinf()
            g, z, multipliers = (torch.where(ok, x, 0) for x in (g, z, multipliers))
            y = torch.where(free, y, z)  # an output that is held at an end has no gradient
            dy = None if dy is None else torch.where(free, dy, 0)
        others: Any = (None,) * (len(needs) - 9)
        if any(needs[9:]):
            problem = ctx.kind.restored(ctx.prepared, needed)
            _, *others = problem.envelope(multipliers, u, z, g, needs[8:])
        return None, None, None, dy, None, None, None, None, g * (z - y), *others

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, kind: Problem, complete: bool, found: None, *tensors: Tensor
    ) -> tuple:
        """A batch of batches is a batch: the mapped dimension joins N."""
        size, own, inputs = info.batch_size, tensors[:5], tensors[5:]
        joined, inputs = kind.joined(inputs, in_dims[8:], size)
        own = [lead(x, d, size).flatten(0, 1) for x, d in zip(own, in_dims[3:8], strict=True)]
        loss = _Matched.apply(joined, complete, None, *own, *inputs)
        return loss.unflatten(0, (size, -1)), 0


_matched = direct(_Matched)


def _slow_loss(
    problem: Problem, v: Tensor, y: Tensor, multipliers: Tensor, u: Tensor
) -> Float[Tensor, "N"]:
    terms = torch.addcmul(problem.prepared.activation.psi(y), y, v, value=-1)
    # Outputs held at an end have no loss.
    return terms.masked_fill(u.isinf(), 0).sum(-1) + problem.value(multipliers, u)


def _learnable(status: Tensor) -> Bool[Tensor, "*batch"]:
    # Where no z exists there is nothing to learn. An undecided sample still has the value and the
    # gradient of ℓ at its λ: that is how the paper trains with a solver that stops early.
    return (status == Status.CONVERGED) | (status == Status.MAX_ITERATIONS)


def _warn(status: Tensor) -> None:
    without = int((~_learnable(status)).sum())
    if without:
        warnings.warn(
            f"{without} of {status.numel()} samples have no solution. They add nothing to the loss "
            "or its gradient; solution.report() says why.",
            FailureWarning,
            stacklevel=3,
        )


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
    if y.shape != u.shape:
        raise _misshapen(y, u.shape, "u")
    activation, y = resolve(activation), y.to(u.dtype)
    loss = _reduce(activation.divergence(y, u).sum(-1), reduction)
    if not transforming() and isnan(loss.sum().item()):
        check_range("targets", y, activation)
    return loss


def _misshapen(y: Tensor, shape: torch.Size, name: str) -> ValueError:
    return ValueError(f"y must have the shape of {name}, {tuple(shape)}; got {tuple(y.shape)}.")


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none"; got {reduction!r}.')
    return loss if reduction == "none" else getattr(loss, reduction)()

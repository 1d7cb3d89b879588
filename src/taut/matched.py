"""How the matched loss gets its derivatives: by the envelope theorem, whatever the constraint."""

from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.autograd import direct, lead
from taut.outcome import Status, places, warn
from taut.problems import Problem


@final
class Matched(torch.autograd.Function):
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
        return loss if complete else torch.where(learnable(status), loss, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        kind, ctx.complete, found, y, *solved = inputs[:8]
        found, given = found or solved, inputs[8:]
        # v only where it is needed: it may be written to before the backward pass.
        v, needed = given[0] if y.requires_grad else y, kind.needed(given)
        ctx.save_for_backward(y, v, *found, *needed)
        ctx.save_for_forward(y, given[0], *found, *needed)  # forgotten after this call
        ctx.kind, ctx.prepared = type(kind), kind.prepared

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, v, z, multipliers, u, status, *needed = ctx.saved_tensors
        if torch.is_autocast_enabled(u.device.type):
            with torch.autocast(u.device.type, enabled=False):
                return Matched.backward(ctx, *grads)
        needs = ctx.needs_input_grad
        g = grads[0].unsqueeze(-1)
        dy = g * (ctx.prepared.activation.inverse(y) - v) if needs[3] else None
        dv, ok = z - y, None
        if not ctx.complete:
            ok = learnable(status).unsqueeze(-1)
            free = ok & ~u.isinf()  # an output that is held at an end has no gradient
            dv = torch.where(free, dv, 0)
            dy = None if dy is None else torch.where(free, dy, 0)
        dv, others = g * dv, (None,) * (len(needs) - 9)
        if any(needs[9:]):
            if ok is not None:
                # Within the range, where every function of z is a number.
                z = torch.where(ok, z, ctx.prepared.activation.sigma(torch.zeros_like(z)))
                g, multipliers, u = (torch.where(ok, x, 0) for x in (g, multipliers, u))
            problem = ctx.kind.restored(ctx.prepared, needed)
            _, *others = problem.envelope(multipliers, u, z, g, needs[8:])
        return None, None, None, dy, None, None, None, None, dv, *others

    @staticmethod
    def jvp(ctx: Any, _kind: None, _complete: None, _found: None, ty: Any, *moves: Any) -> Tensor:
        """The same derivatives, taken along the tangents; those of z, λ and u do not matter."""
        y, v, z, multipliers, u, status, *needed = ctx.saved_tensors
        problem, tangents = ctx.kind.restored(ctx.prepared, needed), moves[4:]
        ok = learnable(status).unsqueeze(-1)
        free, inside = ok & ~u.isinf(), problem.prepared.activation.sigma(torch.zeros_like(z))
        z, g = torch.where(ok, z, inside), ok.to(z.dtype)
        multipliers, u = (torch.where(ok, x, 0) for x in (multipliers, u))
        value = torch.zeros_like(z[:, 0])
        if ty is not None:
            slope = problem.prepared.activation.inverse(torch.where(free, y, inside)) - v
            value = value + torch.where(free, slope * ty, 0).sum(-1)
        # The gradient in a matrix is a sum over samples: it is taken along its tangent instead.
        needs = [i != 1 and x is not None for i, x in enumerate(tangents)]
        _, *grads = problem.envelope(multipliers, u, z, g, needs)
        for slope, tangent in zip((z - torch.where(free, y, z), *grads), tangents, strict=True):
            if slope is not None and tangent is not None:
                value = value + (slope * tangent).flatten(1).sum(-1)
        if tangents[1] is not None:
            change = problem.prepared.map.over(tangents[1]).apply(z)
            value = value + (multipliers[:, : change.shape[-1]] * change).sum(-1)
        return value

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        kind: Problem,
        complete: bool,
        found: None,
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        """A batch of batches is a batch: the mapped dimension joins N."""
        size, own, inputs = info.batch_size, tensors[:5], tensors[5:]
        joined, inputs = kind.joined(inputs, in_dims[8:], size)
        own = [lead(x, d, size).flatten(0, 1) for x, d in zip(own, in_dims[3:8], strict=True)]
        loss = Matched.apply(joined, complete, None, *own, *inputs)
        return loss.unflatten(0, (size, -1)), 0


matched: Callable[..., Any] = direct(Matched)


def _slow_loss(
    problem: Problem, v: Tensor, y: Tensor, multipliers: Tensor, u: Tensor
) -> Float[Tensor, "N"]:
    psi = problem.prepared.activation.psi(y)
    terms = torch.addcmul(psi, y, v, value=-1)
    # Outputs held at an end have no loss; a target that is none still shows.
    return torch.where(u.isinf(), 0 * psi, terms).sum(-1) + problem.value(multipliers, u)


def learnable(status: Tensor) -> Bool[Tensor, "*batch"]:
    """Which samples have a loss.

    Where no z exists there is nothing to learn. An undecided sample still has the value and the
    gradient of ℓ at its λ: that is how the paper trains with a solver that stops early.
    """
    return (status == Status.CONVERGED) | (status == Status.MAX_ITERATIONS)


def warn_of_failures(status: Tensor) -> None:
    """Say how many samples have no loss, if there are any."""
    failed = ~learnable(status)
    if bool(failed.any()):
        names = places(failed)
        where = f" (sample {names})" if names else ""
        warn(
            f"{int(failed.sum())} of {status.numel()} samples were not solved{where}. They add "
            "nothing to the loss or its gradient; the report() of their Solution, which project "
            "and layer.solve return, says why."
        )

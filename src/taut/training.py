"""A training step at once: solve, matched loss and memory, with a gradient found on the way."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from taut.autograd import direct, forward_mode, recording, transforming
from taut.backends import Step, Trained, train
from taut.implicit import solve
from taut.prepare import Prepared, Unprepared
from taut.problems import Linear
from taut.solvers import Newton, Solver
from taut.targets import look

_REDUCTIONS = ("mean", "sum", "none")


def loss_at_once(
    known: Callable[[Tensor], Prepared | Unprepared],
    solver: Solver,
    given: tuple[Any, Any, Any, Any],
    table: Tensor | None,
    index: Any,
    reduction: str,
) -> Tensor | None:
    """The reduced loss of v, A, b and y, with λ stored, where one call can do that.

    None, and nothing is stored, where it takes the three calls: they say what is wrong, too.
    """
    v, A, b, y = given
    if (
        torch.compiler.is_compiling()
        or transforming()
        or recording()
        or not (isinstance(v, Tensor) and isinstance(A, Tensor))
        or not (isinstance(b, Tensor) and isinstance(y, Tensor))
        or not v.ndim == A.ndim == 2
    ):
        return None
    n, dtype, graph = v.shape[0], v.dtype, torch.is_grad_enabled()
    if not (
        n > 0
        and v.shape == y.shape
        and v.shape[1] == A.shape[1]
        and b.shape == (n, A.shape[0])
        and dtype is A.dtype is b.dtype is y.dtype
        and isinstance(solver, Newton)
        and reduction in _REDUCTIONS
        and (index is None or index.shape == (n,))
        and not (graph and (A.requires_grad or b.requires_grad or y.requires_grad))
        and not (forward_mode() or A.is_inference())
    ):
        return None
    prepared = known(A)
    if not isinstance(prepared, Prepared):
        return None
    step = Step(v, b, y, 1.0 / n if reduction == "mean" else 1.0, table, index)
    found = train(prepared.backend, step, solver.rules)
    if found is None:
        return None
    if prepared.unsaid:
        problem: Any = Linear(prepared, v, A, b)  # pyright: ignore
        look(problem, y, None, found.loss)
    if reduction != "none":
        loss = v.new_tensor(found.total / n if reduction == "mean" else found.total)
        found = found._replace(loss=loss)
    return _attach(found, prepared, solver, v, A, b, y) if graph and v.requires_grad else found.loss


@final
class _Trained(Function):
    """A loss already found, with its gradient in v; a second derivative goes through the solve."""

    @staticmethod
    def forward(
        ctx: Any, found: Trained, prepared: Prepared, solver: Solver, *inputs: Tensor
    ) -> Tensor:
        ctx.found, ctx.prepared, ctx.solver = found, prepared, solver
        ctx.save_for_backward(*inputs)
        return found.loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        g = grads[0].unsqueeze(-1) if grads[0].ndim else grads[0]
        if not torch.is_grad_enabled():
            return None, None, None, ctx.found.dv * g, None, None, None
        v, A, b, y = ctx.saved_tensors
        with torch.autocast(v.device.type, enabled=False):
            problem = Linear(ctx.prepared, v, A, b, ctx.found.multipliers, len(v))
            outcome = solve(problem, ctx.solver, False)
            # Outputs that v holds are left out of the loss.
            dv = g * ctx.found.scale * torch.where(v.isinf(), 0, outcome.z - y)
        return None, None, None, dv, None, None, None


_attach = direct(_Trained)

"""How numbers get their derivatives: by the implicit function theorem, whatever the constraint."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from taut.autograd import (
    differentiable,
    direct,
    forward_mode,
    is_transformed,
    lead,
    transforming,
)
from taut.outcome import Outcome, failure
from taut.prepare import Unprepared
from taut.problems import Problem
from taut.remarks import remarks
from taut.solvers import Solver


def solve(problem: Problem, solver: Solver, fail: bool) -> Outcome:
    """The solution of every sample, with derivatives where they are asked for.

    With `fail`, samples that do not converge raise where nobody can look at them outside.
    """
    inputs = problem.inputs
    if transforming() and any(map(is_transformed, inputs)):
        kind = Kind(problem.bare())
        z, multipliers, u, *rest = Solve.apply(kind, solver, fail, problem.start, *inputs)
        residual, iterations, status = rest
        return Outcome(z, multipliers, u, residual, iterations, status, -1, True)
    if not differentiable(inputs):
        return solver.solve(problem)
    with torch.no_grad():
        outcome = solver.solve(without_tangents(problem) if forward_mode() else problem)
    z, multipliers, u = _attach(problem, outcome, *inputs)
    residual, iterations, status = outcome.residual, outcome.iterations, outcome.status
    failed, held = outcome.failed, outcome.held
    return Outcome(z, multipliers, u, residual, iterations, status, failed, held)


def without_tangents(problem: Problem) -> Problem:
    """The same numbers: `no_grad` keeps no graph, but does not turn forward mode off."""
    return problem.started(problem.start, *(x.detach() for x in problem.inputs))


@final
class Attach(Function):
    """Numbers already found, with their derivatives in the inputs of the problem."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, outcome: Outcome, *inputs: Tensor) -> tuple[Any, ...]:
        keep(ctx, problem, outcome.multipliers, outcome.u, outcome.status, inputs)
        return outcome.z, outcome.multipliers, outcome.u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, *pulled(ctx, grads, ctx.needs_input_grad[2:])

    @staticmethod
    def jvp(ctx: Any, _kind: None, _outcome: None, *tangents: Tensor | None) -> tuple[Any, ...]:
        return pushed(ctx, tangents)


_attach = direct(Attach)


def keep(
    ctx: Any,
    problem: Problem,
    multipliers: Tensor,
    u: Tensor,
    status: Tensor,
    inputs: Sequence[Tensor],
) -> None:
    """For the derivatives: only what they read, so that v and b may be written to meanwhile."""
    ctx.set_materialize_grads(False)
    needed = problem.needed(inputs)
    ctx.save_for_backward(multipliers, u, status, *needed)
    if forward_mode() or transforming():
        ctx.save_for_forward(multipliers, u, status, *needed)
    ctx.kind, ctx.prepared = type(problem), problem.prepared


def pulled(ctx: Any, grads: tuple[Any, ...], needs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients in the inputs."""
    if grads[0] is grads[1] is grads[2] is None:  # `matched_loss` needs nothing from here
        return (None,) * len(needs)
    multipliers, u, status, *needed = ctx.saved_tensors
    problem = ctx.kind.restored(ctx.prepared, needed)
    if torch.is_autocast_enabled(u.device.type):
        with torch.autocast(u.device.type, enabled=False):
            return problem.pullback(multipliers, u, status, grads, needs)
    return problem.pullback(multipliers, u, status, grads, needs)


def pushed(ctx: Any, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tangents of z, λ and u."""
    multipliers, u, status, *needed = ctx.saved_tensors
    problem = ctx.kind.restored(ctx.prepared, needed)
    return problem.pushforward(multipliers, u, status, tangents)


@final
class Kind:
    """A problem without tensors, for a solve under transforms; what it prepared is kept here."""

    def __init__(self, problem: Problem) -> None:
        self.problem: Problem = problem

    def over(self, *inputs: Tensor) -> Problem:
        """The problem of these tensors; A is looked at now, if it was not before."""
        problem = self.problem.over(*inputs)
        if isinstance(problem.prepared, Unprepared):
            prepared = problem.prepared.prepared(problem.prepared.map.over(inputs[1]))
            problem = replace(problem, prepared=prepared)  # pyright: ignore
            self.problem = replace(self.problem, prepared=prepared)  # pyright: ignore
        return problem


@final
class Solve(Function):
    """The solve and its derivatives in one, for torch.func: nobody may look at numbers outside."""

    @staticmethod
    def forward(
        kind: Kind, solver: Solver, fail: bool, start: Tensor | None, *inputs: Tensor
    ) -> tuple[Any, ...]:
        problem = kind.over(*inputs).started(start, *inputs)
        with torch.no_grad():
            outcome = solver.solve(problem)
        if fail and outcome.failed:
            raise failure(
                outcome.status, outcome.residual, remarks(problem, outcome), problem.statement
            )
        found = outcome.z, outcome.multipliers, outcome.u
        return *found, outcome.residual, outcome.iterations, outcome.status

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        kind, _, _, _, *given = inputs
        _, multipliers, u, *others = output
        ctx.mark_non_differentiable(*others)
        keep(ctx, kind.problem, multipliers, u, others[2], given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, None, None, *pulled(ctx, grads[:3], ctx.needs_input_grad[4:])

    @staticmethod
    def jvp(
        ctx: Any, _kind: Any, _solver: Any, _fail: Any, _start: Any, *tangents: Any
    ) -> tuple[Any, ...]:
        return *pushed(ctx, tangents), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, ...]:
        """A batch of batches is a batch: the mapped dimension joins N."""
        kind, solver, fail, start, *inputs = args
        size, dims = info.batch_size, in_dims[4:]
        problem, flat = kind.problem.joined(inputs, dims, size)
        if start is not None:
            start = lead(start, in_dims[3], size).flatten(0, 1)
        found = Solve.apply(Kind(problem), solver, fail, start, *flat)
        return tuple(x.unflatten(0, (size, -1)) for x in found), (0,) * 6

"""Solve around outputs that are held at an end: without them, each sample with an A of its own."""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from taut.analysis import analyse
from taut.backends import Rules
from taut.held import Held, held
from taut.maps import as_map
from taut.outcome import Outcome, Status
from taut.problems import Inequalities, Linear
from taut.solvers.base import Task, leave, relative, usable
from taut.systems import wide

_ROOM = 2**24  # entries of all A at a time


def held_outputs(problem: Linear | Inequalities, lower: Tensor, upper: Tensor) -> Held | None:
    """Which outputs are held; None where none is, or A is too large to be taken apart.

    `lower` and `upper` are what the rows ask for: both b, for equations.
    """
    prepared = problem.prepared
    rows, columns = prepared.map.shape
    bounds = problem.bounds if isinstance(problem, Inequalities) else ()
    if rows * columns > _ROOM or (prepared.map.shared and not prepared.finite):
        return None
    known = prepared.reach()
    if known is None and not (bounds and bool(problem.v.isinf().any())):
        return None
    dtype, eps = wide(problem.v), torch.finfo(problem.v.dtype).eps
    A = prepared.map.over(problem.data.to(dtype))
    asked = lower.to(dtype), upper.to(dtype)
    bounds = tuple(x.to(dtype) for x in bounds)
    return held(A, problem.v.to(dtype), asked, prepared.activation, known, eps, bounds)


def portions(problem: Linear, found: Held) -> list[Held]:
    """As many samples at a time as there is room for."""
    rows, columns = problem.prepared.map.shape
    size = max(1, _ROOM // max(1, rows * columns))
    return [Held(*x) for x in zip(*(y.split(size) for y in found), strict=True)]


def without(problem: Linear, part: Held, rules: Rules) -> tuple[Task, Tensor]:
    """The samples `part` of the problem without their held outputs, and where to start."""
    few, dtype = problem.take(part.index), rules.dtype or problem.v.dtype
    eps = torch.finfo(problem.v.dtype).eps
    A, free = few.prepared.map.over(few.data.to(dtype)), ~part.which
    end = part.end.to(dtype).masked_fill(free, 0)
    v, b = torch.where(free, few.v.to(dtype), 0), few.b.to(dtype) - A.apply(end)
    each = A.dense() * free.unsqueeze(-2)
    # An equation without outputs asks for nothing more: what is left is rounding, or a failure
    # that shows in the whole.
    b = b.masked_fill((each == 0).all(-1), 0)
    basis = analyse(each.double(), eps).to(dtype)
    task = Task(few.prepared.activation, as_map(each), v, b, basis, eps)
    start = torch.zeros_like(b) if few.start is None else usable(task, few.start.to(dtype))
    return task, start


def whole(
    problem: Linear, part: Held, rules: Rules, task: Task, found: tuple[Tensor, ...]
) -> tuple[Outcome, Bool[Tensor, "n"]]:
    """With the held outputs at their ends again; and which samples are decided by that.

    Those whose outputs v itself holds are decided as they are. The rest only if they converge:
    without a solution at these ends, the equations as they were have the proof.
    """
    few, dtype = problem.take(part.index), task.v.dtype
    multipliers, u, z, iterations, status = found
    A = few.prepared.map.over(few.data.to(dtype))
    z = torch.where(part.which, part.end.to(dtype), z)
    upper = few.prepared.activation.range.bounds(part.end)[1]
    sides = torch.where(part.end == upper, torch.inf, -torch.inf).to(dtype)
    sides = torch.where(few.v.isinf(), few.v.to(dtype), sides)
    u = torch.where(part.which, sides, u)
    scale = few.b.to(dtype).abs() + A.abs().apply(z.abs())
    residual = A.excess(z, few.b.to(dtype))
    keeps = relative(residual, scale) <= rules.cap(problem.v.dtype)
    broken = (status == Status.CONVERGED) & ~keeps
    # Beside outputs that v holds, equations that leave no room for b contradict the ends, not A.
    broken = broken | (part.given & (status == Status.INCONSISTENT))
    status = status.masked_fill(broken, int(Status.INFEASIBLE))
    if bool(broken.any()):
        # What no z removes of b − A z is orthogonal to all that is free: a proof.
        rest = task.basis.disagreement(-residual, torch.ones_like(residual))
        multipliers = torch.where(broken.unsqueeze(-1), rest, multipliers)
    outcome = leave(few, replace(task, A=A), None, (multipliers, u, z, iterations, status))
    return replace(outcome, held=True), part.given | (status == Status.CONVERGED)

"""The ops: their numbers, and what a compiler must know of them."""

from collections.abc import Sequence
from functools import cache
from math import isfinite
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from taut.autograd import differentiated, lead
from taut.backends import Step, train
from taut.compiled.memo import Memo
from taut.matched import Matched, warn_of_failures
from taut.outcome import failure
from taut.problems import Inequalities, Linear, Problem
from taut.remarks import remarks
from taut.solvers import Newton
from taut.targets import check_targets

DTYPES: dict[str, torch.dtype | None] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "": None,
}
MEMO = Memo(entries=64, numbers=2**23)


def _posed(start: Tensor | None, text: str, numbers: Tensor | None, *own: Any) -> Problem:
    """The problem of these arguments: without `upper` a `Linear`, whose b is `lower`."""
    equations, v, C, lower, upper, *bounds = own
    prepared: Any = MEMO.prepared(text, numbers, C, None if upper is None else equations)
    if upper is None:
        return Linear(prepared, v, C, lower, start)
    bounds = () if bounds[0] is None else tuple(bounds)
    return Inequalities(prepared, v, C, lower, upper, bounds, equations, start)


@cache
def _newton(tol: float | None, max_iterations: int, dtype: str) -> Newton:
    return Newton(tol, max_iterations, DTYPES[dtype])


def _solve(*args: Any) -> tuple[Tensor, ...]:
    *own, start, tol, max_iterations, dtype, fail = args
    problem = _posed(start, *own)
    outcome = _newton(tol, max_iterations, dtype).solve(problem)
    if fail and outcome.failed:
        remark = remarks(problem, outcome)
        raise failure(outcome.status, outcome.residual, remark, problem.statement)
    found = (outcome.z, outcome.multipliers, outcome.u, outcome.residual)
    return tuple(x.contiguous() for x in (*found, outcome.iterations, outcome.status))


def _solve_backward(*args: Any) -> list[Tensor]:
    *own, multipliers, u, status, g_z, g_multipliers, g_u, needs = args
    problem = _posed(None, *own)
    needs = needs[: len(problem.inputs)]
    grads = problem.pullback(multipliers, u, status, (g_z, g_multipliers, g_u), needs)
    return _needed(grads, needs)


def _matched_loss(*args: Any) -> tuple[Tensor, Tensor]:
    """Of each sample: its loss, and the derivative of that in v."""
    *own, z, multipliers, u, status, y = args
    problem = _posed(None, *own)
    found, complete = (z, multipliers, u, status), _complete(status, u)
    loss = Matched.forward(problem, complete, found, y, None, None, None, None, *problem.inputs)
    if not complete:
        warn_of_failures(status)
    if bool(loss.sum().isnan()):
        check_targets(y, status, problem.prepared.activation)
    g, needs = torch.ones_like(loss), [False, True] + [False] * 5
    return loss, z - y if complete else _matched_loss_backward(*args, g, needs)[0]


def _matched_loss_backward(*args: Any) -> list[Tensor]:
    *own, z, multipliers, u, status, y, g, needs = args
    problem = _posed(None, *own)
    needs = needs[: 1 + len(problem.inputs)]
    context = SimpleNamespace(
        saved_tensors=(y, own[3], z, multipliers, u, status, *problem.needed(problem.inputs)),
        needs_input_grad=(*[False] * 3, needs[0], *[False] * 4, *needs[1:]),
        kind=type(problem),
        prepared=problem.prepared,
        complete=_complete(status, u),
    )
    grads = Matched.backward(context, g)
    return _needed((grads[3], *grads[8:]), needs)


def _loss(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sample: its loss, the derivative of that in v, and the λ to be kept."""
    *own, start, tol, max_iterations, dtype, _, y = args
    text, numbers, _, v, C, b, upper, *_ = own
    if upper is None:
        backend = MEMO.prepared(text, numbers, C, None).backend
        rules = _newton(tol, max_iterations, dtype).rules
        found = train(backend, Step(v, b, y, 1.0, start, None), rules)
        if found is not None:
            return found.loss, found.dv, found.multipliers
    z, multipliers, u, _, _, status = _solve(*args[:-1])
    loss, slope = _matched_loss(*own, z, multipliers, u, status, y)
    usable = multipliers.isfinite().all(-1, keepdim=True) & (status <= 1).unsqueeze(-1)
    return loss, slope, multipliers if start is None else torch.where(usable, multipliers, start)


def _complete(status: Tensor, u: Tensor) -> bool:
    """Is it plain that all samples have converged, and that no output is held at an end?"""
    return not bool(status.any()) and isfinite(u.sum().item())


def _needed(grads: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    pairs = zip(grads, needs, strict=False)
    return [x.contiguous() for x, needed in pairs if needed and x is not None]


# What a compiler must know of them: shapes, derivatives, batches. Arguments 3 to 8 are the inputs
# of the problem, v first, C second.


def _shape_of_solve(*args: Any) -> tuple[Tensor, ...]:
    v, C = args[3:5]
    n = v.shape[0]
    counts = v.new_empty(n, dtype=torch.long)
    found = v.new_empty(v.shape), v.new_empty(n, C.shape[-2]), v.new_empty(v.shape)
    return *found, v.new_empty(n), counts, torch.empty_like(counts)


def _shape_of_solve_backward(*args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, needed in zip(args[3:9], args[-1], strict=True) if needed]


def _shape_of_matched_loss(*args: Any) -> tuple[Tensor, Tensor]:
    return args[3].new_empty(args[3].shape[0]), args[3].new_empty(args[3].shape)


def _shape_of_matched_loss_backward(*args: Any) -> list[Tensor]:
    pairs = zip((args[13], *args[3:9]), args[-1], strict=True)
    return [x.new_empty(x.shape) for x, needed in pairs if needed]


def _shape_of_loss(*args: Any) -> tuple[Tensor, ...]:
    v, C = args[3:5]
    return v.new_empty(v.shape[0]), v.new_empty(v.shape), v.new_empty(v.shape[0], C.shape[-2])


def _keep(ctx: Any, inputs: tuple[Any, ...], found: tuple[Any, ...], v: Tensor | None) -> None:
    text, numbers, equations, _, C, lower, upper, *bounds = inputs[:9]
    lower = None if upper is None else lower  # no derivative reads b
    ctx.save_for_backward(numbers, v, C, lower, upper, *bounds, *found)
    ctx.written = text, equations


def _kept(ctx: Any, multipliers: int) -> tuple[tuple, tuple]:
    numbers, v, C, lower, *sides = ctx.saved_tensors[:7]
    text, equations = ctx.written
    found = ctx.saved_tensors[7:]
    lower = found[multipliers] if lower is None else lower
    v = found[multipliers + 1] if v is None else v  # of its shape, and not read
    return (text, numbers, equations, v, C, lower, *sides), found


def _setup_solve(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    _keep(ctx, inputs, (output[1], output[2], output[5]), None)


def _backward_of_solve(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    if grads[0] is grads[1] is grads[2] is None:  # the matched loss needs nothing from here
        return (None,) * 14
    own, found = _kept(ctx, 0)
    needs = ctx.needs_input_grad[3:9]
    dx = iter(torch.ops.taut.solve_backward(*own, *found, *grads[:3], needs))
    return None, None, None, *(next(dx) if needed else None for needed in needs), *(None,) * 5


def _setup_matched_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    needs = ctx.needs_input_grad
    ctx.only = not any((*needs[4:9], needs[13]))  # z, λ and u get none: the envelope theorem
    if ctx.only:  # v, whose gradient is here
        ctx.save_for_backward(output[1])
    else:
        _keep(ctx, inputs, inputs[9:], inputs[3] if needs[13] else None)


def _backward_of_matched_loss(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if g is None:
        return (None,) * 14
    if ctx.only:
        return None, None, None, g.unsqueeze(-1) * ctx.saved_tensors[0], *(None,) * 10
    own, found = _kept(ctx, 1)
    needs = ctx.needs_input_grad[13], *ctx.needs_input_grad[3:9]
    dx = iter(torch.ops.taut.matched_loss_backward(*own, *found, g, needs))
    dy, *others = (next(dx) if needed else None for needed in needs)
    return None, None, None, *others, None, None, None, None, dy


def _setup_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    if any(needed for i, needed in enumerate(ctx.needs_input_grad) if i != 3):
        raise RuntimeError("taut::loss has a gradient in v only: take taut::matched_loss.")
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[1])


def _backward_of_loss(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    dv = None if g is None else g.unsqueeze(-1) * ctx.saved_tensors[0]
    return None, None, None, dv, *(None,) * 11


def _joined(info: Any, dims: tuple[Any, ...], args: tuple[Any, ...], spread: bool = False) -> list:
    """A batch of batches is a batch: the mapped dimension joins N.

    With `spread` a C for all samples becomes one for each, so that its gradients stay apart.
    """
    size, joined = info.batch_size, list(args)
    own = [i for i, x in enumerate(args) if isinstance(x, Tensor) and i not in (1, 4)]
    for i in own:
        joined[i] = lead(args[i], dims[i], size).flatten(0, 1)
    shared = args[4].ndim - (dims[4] is not None) == 2
    if spread or not shared or dims[4] is not None:
        C = lead(args[4], dims[4], size)
        n = joined[3].shape[0] // size
        C = C.unsqueeze(1).expand(size, n, *C.shape[-2:]) if shared else C
        joined[4] = C.flatten(0, 1)
    return joined


def _apart(size: int, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.unflatten(0, (size, x.shape[0] // size)) for x in found)


def _vmap_solve(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, ...]:
    found = _apart(info.batch_size, torch.ops.taut.solve(*_joined(info, dims, args)))
    return found, (0,) * len(found)


def _vmap_loss(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, ...]:
    return _apart(info.batch_size, torch.ops.taut.loss(*_joined(info, dims, args))), (0, 0, 0)


def _vmap_matched_loss(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, ...]:
    found = torch.ops.taut.matched_loss(*_joined(info, dims, args))
    return _apart(info.batch_size, found), (0, 0)


def _vmap_backward(name: str, first: int) -> Any:
    """The rule of an op whose gradients begin with those of so many others."""

    def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, ...]:
        needs = args[-1]
        joined = _joined(info, dims, args, spread=needs[first + 1])
        found = list(_apart(info.batch_size, getattr(torch.ops.taut, name)(*joined)))
        if needs[first + 1] and args[4].ndim - (dims[4] is not None) == 2:
            place = sum(needs[: first + 1])
            found[place] = found[place].sum(1)
        return found, [0] * len(found)

    return rule


LIBRARY = torch.library.Library("taut", "DEF")


def _define(
    name: str, schema: str, numbers: Any, shape: Any, setup: Any, backward: Any, batches: Any
) -> None:
    """Two ops: one with derivatives, and one of the numbers alone, which is left in a graph.

    What derivatives need of Python is then done while a graph is made, and not in each call.
    """

    def plainly(*args: Any) -> Any:
        """Without a graph and without autocast, whatever is around."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return plainly(*args)
        device = args[3].device.type
        if not torch.is_autocast_enabled(device):
            return numbers(*args)
        with torch.autocast(device, enabled=False):
            return numbers(*args)

    for own in (name, f"{name}_numbers"):
        LIBRARY.define(own + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(own, plainly, "CompositeExplicitAutograd")
        torch.library.register_fake(f"taut::{own}", shape, lib=LIBRARY)
        torch.library.register_vmap(f"taut::{own}", batches, lib=LIBRARY)
    op = getattr(torch.ops.taut, f"{name}_numbers").default  # a packet takes longer to call
    LIBRARY.impl(name, differentiated(op, setup, backward), "Autograd")


_PROBLEM = (
    "(str activation, Tensor? numbers, int equations, Tensor v, Tensor C, Tensor lower, "
    "Tensor? upper, Tensor? floor, Tensor? ceiling, "
)
_RULES = "Tensor? start, float? tol, int max_iterations, str dtype, bool fail"
_FOUND = "Tensor multipliers, Tensor u, Tensor status, "
_define(
    "solve",
    f"{_PROBLEM}{_RULES}) -> (Tensor z, Tensor multipliers, Tensor u, Tensor residual, "
    "Tensor iterations, Tensor status)",
    _solve,
    _shape_of_solve,
    _setup_solve,
    _backward_of_solve,
    _vmap_solve,
)
_define(
    "solve_backward",
    f"{_PROBLEM}{_FOUND}Tensor? g_z, Tensor? g_multipliers, Tensor? g_u, bool[] needs) -> Tensor[]",
    _solve_backward,
    _shape_of_solve_backward,
    None,
    None,
    _vmap_backward("solve_backward", 0),
)
_define(
    "matched_loss",
    f"{_PROBLEM}Tensor z, {_FOUND}Tensor y) -> (Tensor loss, Tensor slope)",
    _matched_loss,
    _shape_of_matched_loss,
    _setup_matched_loss,
    _backward_of_matched_loss,
    _vmap_matched_loss,
)
_define(
    "matched_loss_backward",
    f"{_PROBLEM}Tensor z, {_FOUND}Tensor y, Tensor g, bool[] needs) -> Tensor[]",
    _matched_loss_backward,
    _shape_of_matched_loss_backward,
    None,
    None,
    _vmap_backward("matched_loss_backward", 1),
)
_define(
    "loss",
    f"{_PROBLEM}{_RULES}, Tensor y) -> (Tensor loss, Tensor slope, Tensor kept)",
    _loss,
    _shape_of_loss,
    _setup_loss,
    _backward_of_loss,
    _vmap_loss,
)

"""A training step in one call of C: solve, matched loss, its gradient, and the memory."""

from ctypes import addressof
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from taut.backends.base import Backend, Rules
from taut.backends.cpu import Cpu
from taut.backends.library import _structures, run

_MADE = ("loss", "dv", "multipliers")


@final
class Step(NamedTuple):
    """N samples of A z = b to be learned; all tensors have one dtype."""

    v: Tensor  # N × K
    b: Tensor  # N × I
    y: Tensor  # N × K
    scale: float  # of the gradient: 1, or 1/N
    table: Tensor | None  # the memory that λ starts from and goes to
    index: Tensor | None  # N: where in the memory; None: the table is the start of each, and stays


@final
class Trained(NamedTuple):
    """What came of it, with λ stored."""

    loss: Tensor  # N
    total: float
    scale: float
    dv: Tensor  # (z − y)·scale
    multipliers: Tensor


def train(backend: Backend, step: Step, rules: Rules) -> Trained | None:
    """The step by the compiled backend; None, and nothing stored, unless all samples are easy."""
    v, b, y, scale, table, index = step
    if not isinstance(backend, Cpu):
        return None
    n, dtype = v.shape[0], v.dtype
    ready = backend.ready(n, rules, dtype)
    if ready is None:
        return None
    known, given = ready
    kept = index is not None
    arrays: Any = {"v": v, "b": b, "y": y, "table" if kept else "start": table, "index": index}
    found = known.calls["train", dtype].addresses(n, arrays, _MADE)
    if found is None:
        return None
    at, (loss, dv, multipliers) = found
    try:
        solve, call = given.calls.pop()  # by one thread of Python at a time
    except IndexError:
        solve, call = _made(known.address, given.values, dtype)
    solve.v, solve.b, solve.b_stride = at["v"], at["b"], at["b_stride"]
    solve.multipliers, solve.samples, solve.next, solve.unsolved = at["multipliers"], n, 0, n
    call.y, call.loss, call.dv, call.scale = at["y"], at["loss"], at["dv"], scale
    call.seen, call.stopped, call.unsolved = 0, 0, n
    solve.index = call.table = None
    if kept and table is not None:
        solve.start, call.entries = at["table"], table.shape[0]
        call.table, solve.index = at["table"], at["index"]
    else:
        solve.start = at.get("start")
    left, total = run("train", call, n * known.work).unsolved, call.total
    given.calls.append((solve, call))
    if left:
        return None
    if kept and table is not None:
        torch.autograd.graph.increment_version(table)
    return Trained(loss, total, scale, dv, multipliers)


def _made(plan: int, values: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """The structures of a solve, and of a call that names it; what is not given is 0."""
    solve = _structures["solve"][0](plan=plan, single=dtype is torch.float32, **values)
    return solve, _structures["train"][0](solve=addressof(solve))

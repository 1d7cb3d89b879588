"""A training step in one call of C: solve, matched loss, its gradient, and the memory."""

from ctypes import addressof
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from taut.backends.base import Backend, Rules
from taut.backends.cpu import Cpu, readable
from taut.backends.library import _structures, run


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
    if not isinstance(backend, Cpu) or not readable(*step[:3], table, index):
        return None
    n = v.shape[0]
    found = backend.ready(n, rules, v.dtype)
    if found is None:
        return None
    known, given = found
    # Kept by name: C reads them by address.
    v, y, b = v.contiguous(), y.contiguous(), b if b.stride(-1) == 1 else b.contiguous()
    loss, dv, multipliers = v.new_empty(n), torch.empty_like(v), v.new_empty(n, b.shape[-1])
    try:
        solve, call = given.calls.pop()  # by one thread of Python at a time
    except IndexError:
        solve, call = _made(known.address, given.values)
    solve.v, solve.b, solve.b_stride = v.data_ptr(), b.data_ptr(), b.stride(0)
    solve.multipliers, solve.samples, solve.next, solve.unsolved = multipliers.data_ptr(), n, 0, n
    call.y, call.loss, call.dv, call.scale = y.data_ptr(), loss.data_ptr(), dv.data_ptr(), scale
    call.seen, call.stopped, call.unsolved = 0, 0, n
    solve.start = None if table is None else table.data_ptr()
    solve.index = call.table = None
    if table is not None and index is not None:
        call.table, call.entries, solve.index = solve.start, len(table), index.data_ptr()
    left, total = run("train", call, n * known.work).unsolved, call.total
    given.calls.append((solve, call))
    if left:
        return None
    if table is not None and index is not None:
        torch.autograd.graph.increment_version(table)
    return Trained(loss, total, scale, dv, multipliers)


def _made(plan: int, values: dict[str, Any]) -> tuple[Any, Any]:
    """The structures of a solve, and of a call that names it; what is not given is 0."""
    solve = _structures["solve"][0](plan=plan, **values)
    return solve, _structures["train"][0](solve=addressof(solve))

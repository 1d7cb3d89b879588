"""From what a user gives to a Problem: validate, broadcast, flatten. Batch dimensions end here."""

from typing import Any

import torch
from torch import Tensor

from taut.maps import as_map
from taut.prepare import Prepared, Unprepared
from taut.problems import Linear

_FLOATS = (torch.float32, torch.float64)


def pose(
    prepared: Prepared | Unprepared, v: Any, A: Tensor | None, b: Any, init: Any
) -> tuple[Linear, torch.Size]:
    """The samples, flat, and their batch dimensions.

    A is the live tensor that gets gradients; None for the detached one in `prepared`.
    """
    given = prepared.A if A is None and isinstance(prepared, Prepared) else A
    start = None if init is None else init.detach()
    if _ordinary(v, given, b, init):
        return Linear(prepared, v, given, b, start, len(v)), v.shape[:-1]  # pyright: ignore
    _validate(v, given, b, init)
    batch, n = v.shape[:-1], v.shape[:-1].numel()
    equations = b.shape[-1]
    b = b.expand(*batch, equations).reshape(n, equations)
    if start is not None:
        start = start.expand(*batch, equations).reshape(n, equations)
    group = v.shape[-2] if v.ndim > 1 else 1
    flat = v.reshape(n, v.shape[-1])
    return Linear(prepared, flat, _data(prepared, A), b, start, group), batch  # pyright: ignore


def validate(v: Any, A: Any, b: Any, init: Any) -> None:
    """Refuse what cannot be a problem, and say what was received."""
    if not _ordinary(v, A, b, init):
        _validate(v, A, b, init)


def _data(prepared: Prepared | Unprepared, A: Tensor | None) -> Tensor:
    """The numbers of A, flat, as the map in `prepared` has them."""
    if A is None:
        return prepared.map.data
    if A.is_inference() and not torch.is_inference_mode_enabled():
        A = A.clone()  # else it could not be kept for a backward pass
    if A.layout is torch.strided:
        return A if A.ndim < 4 else A.flatten(0, -3)
    return as_map(A).data


def _ordinary(v: Any, A: Any, b: Any, init: Any) -> bool:
    """Is it plainly a batch with one A? Asked first, because training asks so often."""
    if not (isinstance(v, Tensor) and isinstance(A, Tensor) and isinstance(b, Tensor)):
        return False
    if v.ndim != 2 or A.ndim != 2:
        return False
    (n, columns), (rows, across), dtype, device = v.shape, A.shape, v.dtype, v.device
    return (
        b.shape == (n, rows)
        and 0 < columns == across
        and dtype is A.dtype is b.dtype
        and dtype in _FLOATS
        and device == A.device == b.device
        and A.layout is torch.strided
        and not A.is_inference()  # it could not be kept for a backward pass
        and (init is None or (init.shape == (n, rows) and init.device == device))
    )


def _validate(v: Any, A: Any, b: Any, init: Any) -> None:
    given = {"v": v, "A": A, "b": b} | ({} if init is None else {"init": init})
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}.")
        if name != "init" and x.dtype not in _FLOATS:
            raise ValueError(
                f"{name} has dtype {x.dtype}; taut works in torch.float32 or torch.float64. "
                f"Convert it with {name}.float() or {name}.double()."
            )
    if A.layout != torch.strided and (A.ndim != 2 or A.shape[-1] != v.shape[-1]):
        raise ValueError(
            "a sparse A must be one (I, K) matrix for all samples; got "
            f"A {tuple(A.shape)} for v {tuple(v.shape)}."
        )
    if not v.dtype == A.dtype == b.dtype:
        raise ValueError(
            f"v, A and b must have one dtype; got {v.dtype}, {A.dtype} and {b.dtype}. "
            "Convert them to the one you want the result in."
        )
    if len({x.device for x in given.values()}) > 1:
        where = ", ".join(f"{name} on {x.device}" for name, x in given.items())
        raise ValueError(f"all tensors must be on one device; got {where}.")
    _validate_shapes(v, A, b, init)


def _validate_shapes(v: Tensor, A: Tensor, b: Tensor, init: Tensor | None) -> None:
    shapes = f"got v {tuple(v.shape)}, A {tuple(A.shape)}, b {tuple(b.shape)}"
    if v.ndim < 1 or b.ndim < 1 or A.ndim < 2:
        raise ValueError(
            f"v must be (*batch, K), A (I, K) or (*batch, I, K), b (*batch, I); {shapes}."
        )
    batch, columns, rows = v.shape[:-1], v.shape[-1], A.shape[-2]
    if columns == 0:
        raise ValueError(f"v has no outputs (K = 0); {shapes}.")
    if A.shape[-1] != columns:
        hint = " Is A transposed?" if A.ndim == 2 and A.shape[0] == columns else ""
        raise ValueError(
            f"A must have one column for each of the K = {columns} outputs in v; {shapes}.{hint}"
        )
    if A.ndim > 2 and A.shape[:-2] != batch:
        raise ValueError(
            f"A for each sample must have the batch dimensions of v, {tuple(batch)}; {shapes}."
        )
    if b.shape not in ((rows,), (*batch, rows)):
        raise ValueError(
            f"b must be (I,) or (*batch, I) = {(*batch, rows)}, an entry per row of A; {shapes}."
        )
    if init is not None and init.shape not in ((rows,), (*batch, rows)):
        raise ValueError(
            f"init must be (I,) or (*batch, I) = {(*batch, rows)}; got {tuple(init.shape)}."
        )

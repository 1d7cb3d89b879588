"""Refuse what cannot be a problem, quoting what was received."""

from typing import Any

import torch
from torch import Tensor

from taut.activation import Activation


def validate(v: Any, A: Any, b: Any, init: Any, activation: Activation, on_failure: str) -> None:
    """Refuse what cannot be a problem, and say what was received."""
    if not _ordinary(v, A, b, init, on_failure):
        _examine(v, A, b, init, on_failure)
    _validate_activation(activation, v)


def _ordinary(v: Any, A: Any, b: Any, init: Any, on_failure: str) -> bool:
    """Is it plainly a batch with one A? Looked at first, because training asks so often."""
    if not (type(v) is type(A) is type(b) is Tensor and (init is None or type(init) is Tensor)):
        return False
    if v.ndim != 2 or A.ndim != 2 or A.layout != torch.strided:
        return False
    (n, columns), (rows, width), dtype = v.shape, A.shape, v.dtype
    shapes = b.shape == (n, rows) and (init is None or init.shape == (n, rows)) and columns == width
    same = dtype == A.dtype == b.dtype and dtype in (torch.float32, torch.float64)
    devices = v.device == A.device == b.device and (init is None or init.device == v.device)
    return shapes and same and devices and columns > 0 and on_failure in ("raise", "return")


def _examine(v: Any, A: Any, b: Any, init: Any, on_failure: str) -> None:
    given = {"v": v, "A": A, "b": b} | ({} if init is None else {"init": init})
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}.")
        if name != "init" and x.dtype not in (torch.float32, torch.float64):
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
    if on_failure not in ("raise", "return"):
        raise ValueError(f'on_failure must be "raise" or "return"; got {on_failure!r}.')
    _validate_shapes(v, A, b, init)


def _validate_activation(activation: Activation, v: Tensor) -> None:
    form = activation.form
    if form is None and activation.parts is None:
        return
    parameters = [activation.range.lower, activation.range.upper]
    parameters += [] if form is None else [form.shift, form.scale, form.temperature]
    for parameter in parameters:
        if isinstance(parameter, Tensor) and parameter.shape not in ((), v.shape[-1:]):
            raise ValueError(
                f"the activation {activation.name!r} has parameters for {len(parameter)} outputs, "
                f"but v has K = {v.shape[-1]}; got v {tuple(v.shape)}."
            )


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

"""From what a user gives to a Problem: validate, broadcast, flatten. Batch dimensions end here."""

from typing import Any

import torch
from torch import Tensor

from taut.accept import FLOATS, as_floating
from taut.activations import Activation
from taut.maps import as_map
from taut.outcome import places
from taut.prepare import Prepared, Unprepared
from taut.problems import Linear


def fitted(v: Any, A: Any, b: Any, init: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What was given as tensors that make a problem; else an error that says what was received."""
    if isinstance(v, Tensor) and isinstance(A, Tensor) and isinstance(b, Tensor):
        dtype, device = v.dtype, v.device
        if (
            v.ndim == A.ndim == 2
            and v.shape[1] == A.shape[1] > 0
            and b.shape == (shape := (len(v), len(A)))
            and dtype is A.dtype is b.dtype
            and dtype in FLOATS
            and device == A.device == b.device
            and (init is None or (init.shape == shape and init.device == device))
        ):
            return v, A, b, init  # plainly a batch with one A; asked first, as training asks often
    if isinstance(v, Tensor) and not v.is_floating_point():
        raise TypeError(f"v must hold floating numbers; got {v.dtype}. Try v.float().")
    v = as_floating("v", v, None)
    A, b = (as_floating(name, x, v.dtype, v.device) for name, x in (("A", A), ("b", b)))
    if init is not None:
        init = as_floating("init", init, v.dtype, v.device)
    _validate(v, A, b, init)
    return v, A, b, init


def pose(
    prepared: Prepared | Unprepared, v: Tensor, A: Tensor | None, b: Tensor, init: Tensor | None
) -> tuple[Linear, torch.Size]:
    """The samples, flat, and their batch dimensions; all tensors are `fitted`.

    A is the live tensor that gets gradients; None for the detached one in `prepared`.
    """
    plain = A is not None and A.ndim == 2 and A.layout is torch.strided and not A.is_inference()
    data, start = A if plain else _data(prepared, A), None if init is None else init.detach()
    if v.ndim == 2 and b.ndim == 2 and (start is None or start.ndim == 2):
        return Linear(prepared, v, data, b, start, len(v)), v.shape[:-1]  # pyright: ignore
    batch, n = v.shape[:-1], v.shape[:-1].numel()
    equations = b.shape[-1]
    b = b.expand(*batch, equations).reshape(n, equations)
    if start is not None:
        start = start.expand(*batch, equations).reshape(n, equations)
    group = v.shape[-2] if v.ndim > 1 else 1
    flat = v.reshape(n, v.shape[-1])
    return Linear(prepared, flat, data, b, start, group), batch  # pyright: ignore


def check_range(name: str, y: Tensor, activation: Activation) -> None:
    """Refuse a y that is not in the closed range of σ."""
    outside = ~activation.range.contains(y)
    if bool(outside.any()):
        lower, upper = activation.range.lower, activation.range.upper
        samples = places(outside.any(-1))
        raise ValueError(
            f"{name} must lie in [{lower}, {upper}], the closed range of {activation.name!r}; got "
            f"{y.detach()[outside][0].item():.6g}{f' in sample {samples}' if samples else ''}. "
            "Clip them, leave these samples out, or use an activation with a wider range."
        )


def _data(prepared: Prepared | Unprepared, A: Tensor | None) -> Tensor:
    """The numbers of A, flat, as the map in `prepared` has them."""
    if A is None:
        return prepared.map.data
    if A.is_inference() and not torch.is_inference_mode_enabled():
        A = A.clone()  # else it could not be kept for a backward pass
    if A.layout is torch.strided:
        return A if A.ndim < 4 else A.flatten(0, -3)
    return as_map(A).data


def _validate(v: Tensor, A: Tensor, b: Tensor, init: Tensor | None) -> None:
    given = {"v": v, "A": A, "b": b} | ({} if init is None else {"init": init})
    if A.layout != torch.strided and (A.ndim != 2 or A.shape[-1] != v.shape[-1]):
        raise ValueError(
            "a sparse A must be one (I, K) matrix for all samples; got "
            f"A {tuple(A.shape)} for v {tuple(v.shape)}."
        )
    for name, x in (("A", A), ("b", b)):
        if x.dtype != v.dtype:
            raise TypeError(
                f"v is {v.dtype} and {name} is {x.dtype}. z has the dtype of v: convert {name} "
                f"with {name}.to(v.dtype), or v, for more digits, with v.to({name}.dtype)."
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

"""What is taken as a tensor: lists, arrays, integers, half precision."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


@runtime_checkable
class NumpyArray(Protocol):
    """An array of NumPy, which the core does not import."""

    __array_interface__: dict[str, Any]


#: What is taken as a tensor, beside one: lists, arrays of NumPy, integers.
Numbers = Int[Tensor, "..."] | Sequence[Any] | NumpyArray


def as_floating(name: str, x: Any, dtype: torch.dtype | None, device: Any = None) -> Tensor:
    """x as a floating tensor. Half precision becomes float32.

    What is not a tensor, or holds integers, gets `dtype`; None: its own, or the default one.

    >>> as_floating("A", [[1, 2]], torch.float64)
    tensor([[1., 2.]], dtype=torch.float64)
    """
    if not isinstance(x, Tensor):
        try:
            x = torch.as_tensor(as_array(x), dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            got = f"{x!r}" if isinstance(x, str) else f"{type(x).__name__}: {error}"
            more = " An activation goes by its name: activation=…." if isinstance(x, str) else ""
            raise TypeError(
                f"{name} must be a tensor, or a list or array of numbers; got {got}.{more}"
            ) from None
    if x.dtype in FLOATS:
        return x
    if x.dtype in _HALVES:
        return x.to(torch.float32)
    if x.dtype is torch.bool or x.is_complex() or x.is_floating_point():
        raise TypeError(f"{name} must hold real numbers; got {x.dtype}. Convert it first.")
    return x.to(dtype or torch.get_default_dtype())


def as_array(x: Any) -> Any:
    """A table of pandas as an array; and one that torch cannot share memory with, copied."""
    if hasattr(x, "to_numpy"):
        x = x.to_numpy()
    shared = getattr(x, "__array_interface__", None)
    if not isinstance(shared, dict) or not hasattr(x, "copy"):
        return x
    memory = shared.get("data")
    read_only = isinstance(memory, tuple) and memory[1]
    return x.copy() if read_only or min(shared.get("strides") or (0,)) < 0 else x


def check_matrix(A: Tensor, b: Tensor | None, name: str = "A") -> None:
    """Refuse an A, or a b beside it, that no v would fit."""
    if name != "A" and A.ndim >= 2 and A.shape[-1] > 0:
        return
    if A.ndim < 2:
        raise ValueError(
            f"{name} must be (I, K), a row for each equation; got {tuple(A.shape)}. One equation "
            f"alone is a matrix too: {name}.unsqueeze(0)."
        )
    if A.shape[-1] == 0:
        raise ValueError(
            f"{name} has no columns, so there are no outputs (K = 0); got {tuple(A.shape)}."
        )
    if b is None:
        return
    if b.dtype != A.dtype:
        raise TypeError(f"A is {A.dtype} and b is {b.dtype}: convert one of them.")
    if b.ndim < 1 or b.shape[-1] != A.shape[-2]:
        raise ValueError(
            f"b must have an entry for each of the I = {A.shape[-2]} rows of A; got "
            f"b {tuple(b.shape)}, A {tuple(A.shape)}."
        )


def check_h(h: Any, sided: bool) -> None:
    """Refuse an h that is no function, or that stands beside inequalities or bounds."""
    if not callable(h):
        raise TypeError(f"h must be a function of (z, *params); got {type(h).__name__}.")
    if sided:
        raise NotImplementedError(
            "nonlinear equations h(z) = 0 do not go together with G, lower or upper. A range of z "
            'is an activation: "exp", "sigmoid", bounded(lower, upper), or mixed of them. Another '
            'inequality is an equation with one more output: h(z) − s = 0 with "exp" for s.'
        )

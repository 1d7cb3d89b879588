"""What is taken as a tensor: lists, arrays, integers, half precision."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


@runtime_checkable
class NumpyArray(Protocol):
    """An array of NumPy, which the core does not import."""

    __array_interface__: dict[str, Any]


@runtime_checkable
class SparseMatrix(Protocol):
    """A matrix or array of scipy.sparse, which the core does not import."""

    def tocoo(self) -> Any:
        """The same by coordinates."""
        ...


#: What is taken as a tensor, beside one: lists, arrays of NumPy, integers; for A and G also a
#: matrix of scipy.sparse.
Numbers = Int[Tensor, "..."] | Sequence[Any] | NumpyArray | SparseMatrix


def as_floating(name: str, x: Any, dtype: torch.dtype | None, device: Any = None) -> Tensor:
    """x as a floating tensor. Half precision becomes float32.

    What is not a tensor, or holds integers, gets `dtype`; None: its own, or the default one.

    >>> as_floating("A", [[1, 2]], torch.float64)
    tensor([[1., 2.]], dtype=torch.float64)
    """
    if not isinstance(x, Tensor):
        if isinstance(x, (int, float)):  # a compiler follows `torch.full`, and not what is below
            return torch.full((), x, dtype=_floating(dtype), device=device)
        try:
            x = _as_tensor(name, x, dtype, device)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise _no_numbers(name, x, error) from None
    if x.dtype in FLOATS:
        return x
    if x.dtype in _HALVES:
        return x.to(torch.float32)
    if x.dtype is torch.bool or x.is_complex() or x.is_floating_point():
        raise TypeError(f"{name} must hold real numbers; got {x.dtype}. Convert it first.")
    return x.to(_floating(dtype))


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    return dtype or torch.get_default_dtype()


def _as_tensor(name: str, x: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    if not is_scipy(x):
        return torch.as_tensor(as_array(x), dtype=dtype, device=device)
    if name not in ("A", "G"):
        raise TypeError(f"only A and G may be sparse, and {name}.toarray() is not")
    if len(x.shape) != 2:
        raise ValueError(f"{name} must be (I, K), and has the shape {x.shape}")
    x = x.tocoo()
    values = torch.as_tensor(as_array(x.data), dtype=dtype, device=device)
    places = (torch.as_tensor(as_array(i), device=device).long() for i in (x.row, x.col))
    return torch.sparse_coo_tensor(torch.stack([*places]), values, x.shape).coalesce()


def is_scipy(x: Any) -> bool:
    """Is x a matrix of scipy.sparse, in whatever format?"""
    return not isinstance(x, Tensor) and hasattr(x, "tocoo")


def _no_numbers(name: str, x: Any, error: Exception) -> TypeError:
    """The error for what is no tensor and cannot become one; it names what can be done."""
    if isinstance(x, str):
        got, more = f"{x!r}", " An activation goes by its name: activation=…."
    else:
        got, more = f"{type(x).__name__}: {error}", ""
    if hasattr(x, "_outcome"):
        got, more = "a Solution", " Its output is a tensor: use solution.z."
    for column in (name for names in labels(x) for name in names):
        kind = cast(Any, x)[column].to_numpy().dtype
        if kind.kind not in "biuf":
            got = f"a frame whose column {column!r} holds no numbers ({kind})"
            more = " Leave that column out, or turn it into numbers."
            break
    return TypeError(f"{name} must be a tensor, or a list or array of numbers; got {got}.{more}")


def labels(x: Any) -> list[list[Any]]:
    """The names of the columns of a frame, of whatever library, in a list; [] of anything else."""
    if isinstance(x, Tensor) or not hasattr(x, "to_numpy"):
        return []
    columns = getattr(x, "columns", None)
    return [] if columns is None else [list(columns)]


def check_labels(**given: Any) -> None:
    """Refuse frames with columns for the same outputs by other names, or in another order."""
    named = [(name, found) for name, x in given.items() for found in labels(x)]
    for (one, first), (other, second) in pairwise(named):
        if first == second or _unnamed(first, second) or _unnamed(second, first):
            continue
        raise ValueError(
            f"the columns of {one} and {other} are outputs, and must have the same names in the "
            f"same order; got {first} in {one}, and {second} in {other}. Reorder one of them, "
            f"{other} = {other}[list({one}.columns)], or pass arrays, {other}.to_numpy(), which "
            "have no names."
        )


def _unnamed(columns: list[Any], others: list[Any]) -> bool:
    """Are these only counted, as a frame without names has them, where the others have names?"""
    counted = columns == list(range(len(columns)))
    return counted and not all(isinstance(name, int) for name in others)


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
            f"b {tuple(b.shape)}, A {tuple(A.shape)}.{one_side(b, b.shape, A)}"
        )


def one_side(b: Tensor, batch: Sequence[int], A: Tensor) -> str:
    """What to do with the b of one equation that lacks its last dimension."""
    if A.ndim < 2 or A.shape[-2] != 1 or b.ndim > len(batch) or b.shape not in ((), (*batch,)):
        return ""
    return " The b of one equation has a last dimension too: b.unsqueeze(-1)."


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

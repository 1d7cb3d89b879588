"""Calling autograd functions, with and without torch.func around them."""

from typing import Any

import torch
from torch import Tensor


def is_transformed(x: Any) -> bool:
    """Is x seen through torch.func (vmap, grad), so that its values cannot be looked at?

    >>> is_transformed(torch.zeros(1))
    False
    """
    functorch = torch._C._functorch  # pyright: ignore
    return isinstance(x, Tensor) and (
        functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, without what torch.func needs where it is not in use.

    That is a signature bound to its arguments, which takes longer than a small solve.
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)
    active = torch._C._are_functorch_transforms_active()  # pyright: ignore
    if active or any(map(is_transformed, args)):
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore

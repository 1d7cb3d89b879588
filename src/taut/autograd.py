"""torch's private names, each once: what torch.func does to tensors, and cheap autograd calls."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad


def transforming() -> bool:
    """Is a transform of torch.func (vmap, grad, jvp) under way?

    >>> transforming()
    False
    """
    # There is no public name for this. Without it `is_transformed` of every tensor says the same.
    return torch._C._are_functorch_transforms_active()  # pyright: ignore


def is_transformed(x: Any) -> bool:
    """Is x seen through torch.func, so that its numbers cannot be looked at?

    >>> is_transformed(torch.zeros(1))
    False
    """
    functorch = torch._C._functorch  # pyright: ignore
    return isinstance(x, Tensor) and (
        functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)
    )


def is_dual(x: Tensor) -> bool:
    """Has x a tangent of forward-mode differentiation? A dual tensor has no `requires_grad`.

    >>> is_dual(torch.zeros(1))
    False
    """
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def apply(function: type[Function], *args: Any) -> Any:
    """`function.apply(*args)`, without what torch.func needs where it is not in use.

    That is a signature bound to its arguments, which takes longer than a small solve.
    """
    if transforming() or torch.compiler.is_compiling() or any(map(is_transformed, args)):
        return function.apply(*args)
    return super(Function, function).apply(*args)  # pyright: ignore


def lead(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with the mapped dimension of vmap in front, repeated where x is not mapped.

    >>> lead(torch.zeros(2), None, 3).shape
    torch.Size([3, 2])
    """
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

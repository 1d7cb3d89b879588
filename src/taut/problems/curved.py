"""Is h what a projection needs? Every call is looked at; each fault has its own sentence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from taut.autograd import forward_mode, is_followed

_SAME = 1e-9  # of its size: how far h of a sample alone may be from h of the batch


def count_equations(h: Callable[..., Any], z: Tensor, params: Sequence[Tensor]) -> int:
    """How many equations h has, once it has been found to be one; z and params are plain."""
    value = _first_call(h, z, params)
    _check_result(value, z)
    if len(z):
        _check_derivatives(h, z[:1], [p[:1] for p in params], value[:1])
    if len(z) > 1:
        turned = _first_call(h, z.flip(0), [p.flip(0) for p in params]).flip(0)
        _check_alike(turned, value, "in the batch turned round")
    return value.shape[-1]


def _first_call(h: Callable[..., Any], z: Tensor, params: Sequence[Tensor]) -> Any:
    given = z.clone()
    before = given._version
    try:
        with torch.no_grad():
            value = h(given, *params)
    except Exception as error:
        shapes = ", ".join(f"{tuple(p.shape)}" for p in params)
        error.add_note(
            f"h was called with z {tuple(z.shape)}{f' and params {shapes}' if shapes else ''}, all "
            f"of {z.dtype}: it is solved in that precision, whatever v has. Constants of h that "
            "meet them in a matrix product must have it too."
        )
        raise
    if given._version != before:
        raise ValueError(
            "h changes z in place. It is called with the z of the solver: write z = z.clone() "
            "first, or use an operation that makes a new tensor."
        )
    return value


def _check_result(value: Any, z: Tensor) -> None:
    n = len(z)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"h must return a tensor (N, M), an entry for each of the M equations; got "
            f"{type(value).__name__}. Try torch.stack([…], -1)."
        )
    if value.ndim != 2 or len(value) != n or value.shape[-1] == 0:
        hint = ""
        if value.shape == (n,):
            hint = " One equation is a column too: .unsqueeze(-1), or keepdim=True."
        elif value.ndim == 1:
            hint = " A function of one sample becomes one of a batch by torch.vmap(h)."
        elif value.ndim == 2 and value.shape[-1]:
            hint = " What belongs to each sample goes to params, which has N in front like z."
        raise ValueError(
            f"h must return (N, M) = ({n}, M) with M ≥ 1 for z {tuple(z.shape)}; got "
            f"{tuple(value.shape)}.{hint}"
        )
    if value.dtype != z.dtype or value.device != z.device:
        raise TypeError(
            f"h must return numbers like z, {z.dtype} on {z.device}; got {value.dtype} on "
            f"{value.device}."
        )


def check_closure(h: Callable[..., Any], z: Tensor, params: Sequence[Tensor]) -> None:
    """Refuse an h that is made of more than z and params, which are plain."""
    with torch.enable_grad():
        if is_followed(h(z, *params)):
            raise ValueError(
                "h closes over a tensor in which derivatives are taken, or that vmap maps, and the "
                "projection would not see that. Pass it in params: (N, …), an entry for each "
                "sample; one for all is p.expand(N, …)."
            )


def _check_derivatives(
    h: Callable[..., Any], z: Tensor, params: Sequence[Tensor], value: Tensor
) -> None:
    """Of the first sample, alone."""
    check_closure(h, z, params)
    with torch.enable_grad():
        leaf = z.clone().requires_grad_()
        alone = h(leaf, *params)
        once = None
        if alone.requires_grad:
            # By multipliers that require a gradient: else it does not show.
            one = torch.ones_like(alone).requires_grad_()
            (once,) = torch.autograd.grad(alone, leaf, one, create_graph=True, allow_unused=True)
        if once is None:
            raise ValueError(
                "h(z) does not depend on z as autograd sees it. Is z detached, or turned into "
                "numbers or another array, inside h?"
            )
        try:
            # Of all there is: what can be done but once leads nowhere. Forward mode may be mapped
            # by vmap, which refuses that.
            if once.requires_grad and not forward_mode():
                once.sum().backward()
        except RuntimeError as error:
            raise TypeError(
                "h must be twice differentiable: the solver needs its second derivatives. torch "
                f"says: {error}"
            ) from error
    _check_alike(alone.detach(), value, "alone")


def _check_alike(one: Tensor, other: Tensor, where: str) -> None:
    """Refuse an h whose value for a sample depends on the others."""
    size = _SAME * (1 + other.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    if not torch.allclose(one, other, rtol=0.0, atol=size.item(), equal_nan=True):
        apart = (one - other).abs().nan_to_num(torch.inf).argmax().item()
        sample, equation = divmod(int(apart), one.shape[-1])
        raise ValueError(
            f"h mixes samples: for sample {sample} it gives {one[sample, equation].item():.10g} "
            f"{where}, and {other[sample, equation].item():.10g} in the batch. Each row of h(z) "
            "may depend on the same row of z and of params only, and on nothing random. What has a "
            "row for each sample belongs in params."
        )

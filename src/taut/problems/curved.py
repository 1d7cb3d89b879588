"""Is h what a projection needs? Every call is looked at; each fault has its own sentence."""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.autograd import forward_mode, is_followed
from taut.problems.surface import Surface

_UNSEEN = (
    "h(z) does not depend on z as autograd sees it. Is z detached, or turned into numbers or "
    "another array, inside h?"
)
_ALONE = (
    "Each row of h(z) may depend on the same row of z and of params only, and on nothing random. "
    "What has a row for each sample belongs in params."
)
_SAME = 1e-9  # of the size of its terms: how far h of few samples may be from h of all


def count_equations(h: Callable[..., Any], z: Tensor, params: Sequence[Tensor]) -> int:
    """How many equations h has, once it has been found to be one; z and params are plain."""
    with torch.enable_grad():
        leaf = z.clone().requires_grad_()
        value = _first_call(h, leaf, params)
    _check_result(value, z)
    n, found = len(z), value.detach()
    if n > 1:
        parts = [x.to(z.device) for x in _halves(n)]
        _check_apart(value, leaf, *parts)
        for part in parts:
            own = _of_part(h, z[part], [p[part] for p in params], found)
            _refuse_followed(own)
            _check_alike(h, own.detach(), found, z, params, part)
    if n:
        _check_derivatives(h, z, params, found)
    return value.shape[-1]


def _halves(n: int) -> tuple[Int[Tensor, "part"], Int[Tensor, "rest"]]:
    """n samples in two parts, by lot; none is empty."""
    first = _random(n) > 0
    first[0], first[-1] = True, False
    return first.nonzero().squeeze(-1), (~first).nonzero().squeeze(-1)


def _random(*shape: int) -> Float[Tensor, "..."]:
    """Numbers in (−1, 1). torch's random numbers are the caller's: their state stays as it is."""
    drawn = bytearray(os.urandom(8 * torch.Size(shape).numel()))
    return (torch.frombuffer(drawn, dtype=torch.int64).double() * 2.0**-63).reshape(shape)


# What h returns


def _first_call(h: Callable[..., Any], leaf: Tensor, params: Sequence[Tensor]) -> Any:
    given = leaf.clone()  # not the leaf itself, which autograd would not let be changed
    before = given._version
    try:
        value = h(given, *params)
    except Exception as error:
        fault = _explained(h, leaf.detach(), params, error)
        if fault is None:
            raise
        raise fault from error
    if given._version != before:
        raise ValueError(
            "h changes z in place. It is called with the z of the solver: write z = z.clone() "
            "first, or use an operation that makes a new tensor."
        )
    return value


def _explained(
    h: Callable[..., Any], z: Tensor, params: Sequence[Tensor], error: Exception
) -> Exception | None:
    """An error whose sentence helps; None where it is one of h itself, which gets a note."""
    shapes = "".join(f", {tuple(p.shape)}" for p in params)
    called = f"z {tuple(z.shape)}" + (f" and params {shapes[2:]}" if shapes else "")
    if isinstance(error, TypeError) and not _takes(h, len(params)):
        return TypeError(
            f"h takes {_arguments(h)} and was called with z and {len(params)} "
            f"{'parameter' if len(params) == 1 else 'parameters'}: what h takes after z is given "
            "as params=(…), a tensor for each argument, with an entry for each sample."
        )
    if _works(h, z, params, z.dtype):  # where no derivatives are asked
        return ValueError(f"{_UNSEEN} It says “{error}”.")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if _works(h, z, params, dtype):
            return TypeError(
                f"h has a constant of {dtype}: with {called} of {dtype} it works, with {z.dtype} "
                f"it says “{error}”. It is solved in {z.dtype}, whatever v has. Give its constants "
                "that precision, W.double(), or W.to(z.dtype) inside h."
            )
    if "device" in str(error):
        return ValueError(
            f"h was called with {called}, all on {z.device}, and says “{error}”. Its constants "
            "must be there too: W.to(z.device) inside h."
        )
    error.add_note(f"h was called with {called}, all of {z.dtype}, on {z.device}.")
    return None


def _takes(h: Callable[..., Any], count: int) -> bool:
    """Can h be called with z and so many params?"""
    try:
        inspect.signature(h).bind(*range(1 + count))
    except TypeError:
        return False
    except ValueError:  # it does not say
        pass
    return True


def _arguments(h: Callable[..., Any]) -> str:
    return f"({', '.join(inspect.signature(h).parameters)})"


def _works(h: Callable[..., Any], z: Tensor, params: Sequence[Tensor], dtype: torch.dtype) -> bool:
    try:
        with torch.no_grad():
            h(z.to(dtype), *(p.to(dtype) for p in params))
    except Exception:
        return False
    return True


def _check_result(value: Any, z: Tensor) -> None:
    n = len(z)
    if not isinstance(value, Tensor):
        hint = "torch.stack([…], -1)"
        if isinstance(value, (tuple, list)) and all(
            isinstance(x, Tensor) and x.ndim == 2 for x in value
        ):
            hint = "torch.cat([…], -1)"
        raise TypeError(
            f"h must return a tensor (N, M), an entry for each of the M equations; got "
            f"{type(value).__name__}. Try {hint}."
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
            f"{value.device}. Its constants must be like z: W.to(z) inside h."
        )


def check_closure(h: Callable[..., Any], z: Tensor, params: Sequence[Tensor]) -> None:
    """Refuse an h that is made of more than z and params, which are plain."""
    with torch.enable_grad():
        _refuse_followed(h(z, *params))


def _refuse_followed(value: Tensor) -> None:
    if is_followed(value):
        raise ValueError(
            "h closes over a tensor in which derivatives are taken, or that vmap maps, and the "
            "projection would not see that. Pass it in params: (N, …), an entry for each sample; "
            "one for all is p.expand(N, …)."
        )


def _check_derivatives(
    h: Callable[..., Any], z: Tensor, params: Sequence[Tensor], value: Tensor
) -> None:
    """Of the first sample, alone; `value` is that of all."""
    first = [p[:1] for p in params]
    if len(z) == 1:
        check_closure(h, z, first)
    leaf = z[:1].clone().requires_grad_()
    alone = _of_part(h, leaf, first, value)
    _check_alike(h, alone.detach(), value, z, params, torch.zeros_like(z[:1, 0], dtype=torch.long))
    with torch.enable_grad():
        once = None
        if alone.requires_grad:
            # By multipliers that require a gradient: else it does not show.
            one = torch.ones_like(alone).requires_grad_()
            (once,) = torch.autograd.grad(alone, leaf, one, create_graph=True, allow_unused=True)
        if once is None:
            raise ValueError(_UNSEEN)
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


# Each sample by itself


def _check_apart(
    value: Tensor, leaf: Tensor, part: Int[Tensor, "n"], rest: Int[Tensor, "m"]
) -> None:
    """Refuse an h whose value in one half of the samples has a derivative in the other."""
    if not value.requires_grad:
        return
    weights = torch.zeros_like(value)
    weights[part] = _random(len(part), value.shape[-1]).to(value)
    (found,) = torch.autograd.grad(value, leaf, weights, allow_unused=True)
    if found is None:
        return
    # NaN is 0 times an infinite derivative of the sample's own.
    seen = ((found[rest] != 0) & ~found[rest].isnan()).any(-1)
    if bool(seen.any()):
        raise ValueError(
            f"h mixes samples: by autograd, h of other samples depends on z of sample "
            f"{rest[seen][0].item()}. {_ALONE}"
        )


def _check_alike(
    h: Callable[..., Any],
    own: Tensor,
    value: Tensor,
    z: Tensor,
    params: Sequence[Tensor],
    part: Int[Tensor, "n"],
) -> None:
    """Refuse an h whose value for some samples depends on the others, as autograd may not see."""
    whole = value[part]
    if torch.equal(own, whole):
        return
    apart = (own - whole).abs().nan_to_num(torch.inf)
    apart = torch.where((own == whole) | (own.isnan() & whole.isnan()), 0, apart)
    rows = (apart > _SAME * whole.abs()).any(-1).nonzero().squeeze(-1)
    if len(rows) == 0:
        return
    # Near a solution h is the rounding of its terms, and these are |J||z| in size.
    few = part[rows]
    b = z.new_zeros(len(few), 0)
    surface = Surface(h, tuple(p[few] for p in params), z.new_zeros(0, z.shape[-1]), b)
    slopes = surface.at(z[few]).jacobian() * z[few].unsqueeze(-2)
    terms = slopes.nan_to_num(0.0).abs().sum(-1) + whole[rows].abs()
    wrong = apart[rows] > _SAME * terms
    if bool(wrong.any()):
        row, equation = wrong.nonzero()[0].tolist()
        one, other = (x[rows[row], equation].item() for x in (own, whole))
        raise ValueError(
            f"h mixes samples: for sample {few[row].item()} it gives {one:.10g} "
            f"{'alone' if len(part) == 1 else f'in a part of {len(part)}'}, and {other:.10g} in "
            f"the batch of {len(z)}. {_ALONE}"
        )


def _of_part(
    h: Callable[..., Any], z: Tensor, params: Sequence[Tensor], whole: Tensor
) -> Float[Tensor, "n M"]:
    """h of some of the samples: the solver asks for those that are not finished."""
    (n, equations), of = whole.shape, f"{len(z)} of {len(whole)} samples"
    cause = "If h closes over a tensor with an entry for each sample, pass that in params=(…)."
    try:
        with torch.enable_grad():
            value = h(z, *params)
    except Exception as error:
        raise ValueError(
            f"h works with all samples, z ({n}, {z.shape[-1]}), and with {of}, z "
            f"{tuple(z.shape)}, says “{error}”. It is called with parts of the batch too. {cause}"
        ) from error
    if isinstance(value, Tensor) and value.shape == (len(z), equations):
        return value
    got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    flat = [i for i, p in enumerate(params) if p.ndim == 1]
    if flat:
        cause = (
            f"params[{flat[0]}] has one number for each sample, ({n},), and beside a column "
            f"({n}, 1) that makes ({n}, {n}): give it a last dimension, p.unsqueeze(-1)."
        )
    raise ValueError(
        f"h returns {tuple(whole.shape)} with all samples, z ({n}, {z.shape[-1]}), and {got} with "
        f"{of}, z {tuple(z.shape)}: ({len(z)}, {equations}) was expected. {cause}"
    )

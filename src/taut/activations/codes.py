"""σ as numbers, output by output: for backends, which know no Python functions."""

import json
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.activations.activation import Activation, Interval, Written
from taut.activations.derived import Affine, Mixture
from taut.activations.table import (
    ACTIVATIONS,
    _srlu_sigma,
    exp,
    linear,
    sigmoid,
    srlu,
    tanh,
)

#: The base functions that have a code: their place here.
KINDS = (exp, sigmoid, tanh, linear)
# By function, not by object: an activation that comes out of a file is another object.
_CODES = {activation.sigma: code for code, activation in enumerate(KINDS)}


@final
class Codes(NamedTuple):
    """σ_k(u) = shift + scale·base(u/temperature), kept within [lower, upper], for each output k."""

    kind: Int[Tensor, "K"]
    shift: Float[Tensor, "K"]
    scale: Float[Tensor, "K"]
    temperature: Float[Tensor, "K"]
    lower: Float[Tensor, "K"]  # −inf and inf where the base has no two ends
    upper: Float[Tensor, "K"]


def codes(
    activation: Activation, outputs: int, two: Float[Tensor, "2 K"] | None = None
) -> Codes | None:
    """The codes of `activation` for so many outputs; None where it has none.

    Whoever passes `two` knows one more kind, srlu: its numbers a and b are written there.

    >>> codes(exp, 2).kind.tolist()
    [0, 0]
    >>> from taut.activations import srlu
    >>> codes(srlu(), 2) is None
    True
    >>> two = torch.zeros(2, 1).double()
    >>> codes(srlu(3.0, 0.5), 1, two).kind.tolist(), two.tolist()
    ([4], [[3.0], [0.5]])
    """
    numbers = torch.full((outputs,), 1.0, dtype=torch.float64, device="cpu")
    kind = torch.zeros(outputs, dtype=torch.int8, device="cpu")
    ends = torch.inf * numbers
    found = Codes(kind, 0 * numbers, numbers, numbers.clone(), -ends, ends)
    for part, place in _parts(activation, outputs):
        form = part._form if isinstance(part._form, Affine) else Affine(part)
        code = _CODES.get(form.base.sigma)
        if code is None and two is not None:
            name, *parameters = json.loads(getattr(spelled(form.base), "text", "[null]"))
            if name == "srlu":
                code = len(KINDS)
                two[:, place] = two.new_tensor(parameters).unsqueeze(-1)
        if code is None:
            return None
        found.kind[place] = code
        values = {"shift": form.shift, "scale": form.scale, "temperature": form.temperature}
        if form.base.range.bounded:
            values |= {"lower": form.ends.lower, "upper": form.ends.upper}
        for name, value in values.items():
            getattr(found, name)[place] = torch.as_tensor(value, dtype=ends.dtype, device="cpu")
    return found


def spelled(activation: Activation) -> Written | None:
    """The activation as text and numbers; None for one's own.

    >>> spelled(exp).text
    '["exp"]'
    """
    return activation._written


def read(text: str, numbers: Tensor | None) -> Activation:
    """The activation that was written so: the same functions of the same numbers.

    >>> from taut.activations import bounded
    >>> again = read(*spelled(bounded(-1.0, 3.0)))
    >>> again.name, again.range
    ('bounded', Interval(lower=-1.0, upper=3.0))
    """
    left = [] if numbers is None else [numbers]

    def taken(part: Any) -> Any:
        if not isinstance(part, list):
            return part
        found, left[0] = left[0].split([part[0], len(left[0]) - part[0]])
        return found.clone()

    def made(node: list) -> Activation:
        kind, *rest = node
        if kind == "srlu":
            return srlu(*rest)
        if kind == "affine":
            name, base, *parameters = rest
            base = made(base)
            shift, scale, temperature, *ends = map(taken, parameters)
            return Affine(base, shift, scale, temperature, Interval(*ends)).activation(name)
        if kind == "mixed":
            half = len(rest) // 2
            members = tuple(map(made, rest[:half]))
            places = tuple(taken(place).long() for place in rest[half:])
            return Mixture(members, places, torch.argsort(torch.cat(places))).activation()
        return ACTIVATIONS[kind]

    return made(json.loads(text))


def _parts(activation: Activation, outputs: int) -> list[tuple[Activation, Tensor | slice]]:
    form = activation._form
    if isinstance(form, Mixture):
        return list(zip(form.members, form.places, strict=True))
    return [(activation, slice(outputs))]


def width(activation: Activation) -> int | None:
    """How many outputs it is for; None for any number.

    >>> from taut.activations import mixed
    >>> width(mixed(["exp", "linear"])), width(exp)
    (2, None)
    """
    form, ends = activation._form, activation.range
    if isinstance(form, Mixture):
        return len(form.order)
    numbers = [ends.lower, ends.upper]
    if isinstance(form, Affine):
        numbers += [form.shift, form.scale, form.temperature]
    return next((len(x) for x in numbers if isinstance(x, Tensor) and x.ndim), None)


def units(activation: Activation, outputs: int) -> Float[Tensor, "K"]:
    """The u that is a unit to σ, for each output: its temperature; inf where σ is a line.

    >>> from taut.activations import mixed, tempered
    >>> units(mixed(["exp", tempered("sigmoid", 0.5), "linear"]), 3)
    tensor([1.0000, 0.5000,    inf], dtype=torch.float64)
    """
    found = torch.ones(outputs, dtype=torch.float64, device="cpu")
    for part, place in _parts(activation, outputs):
        form = part._form
        if is_line(part):
            found[place] = torch.inf
        elif isinstance(form, Affine):
            temperature = torch.as_tensor(form.temperature, dtype=found.dtype, device="cpu")
            found[place] = temperature.abs()
    return found


def is_line(activation: Activation) -> bool:
    """Is σ a line, so that σ' knows nothing of u?

    >>> from taut.activations import tempered
    >>> is_line(tempered("linear", 2.0)), is_line(exp)
    (True, False)
    """
    base = _base(activation)
    if isinstance(base._form, Mixture):
        return all(map(is_line, base._form.members))
    return base.sigma is linear.sigma


@lru_cache(maxsize=64)
def bends(activation: Activation, outputs: int) -> Bool[Tensor, "K"] | None:
    """Which outputs have a σ that is another function some units of u further on.

    The slopes of lines and of srlu stay within a factor of 3, so a step may be of any length. None
    says that all outputs bend.

    >>> from taut.activations import mixed
    >>> bends(mixed(["exp", "linear", "srlu"]), 3), bends(exp, 3)
    (tensor([ True, False, False]), None)
    """
    parts = _parts(_base(activation), outputs)
    even = [_is_even(part) for part, _ in parts]
    if not any(even):
        return None
    found = torch.ones(outputs, dtype=torch.bool, device="cpu")
    for (_, place), one in zip(parts, even, strict=True):
        found[place] = not one
    return found


def _is_even(activation: Activation) -> bool:
    sigma = _base(activation).sigma
    return sigma is linear.sigma or (isinstance(sigma, partial) and sigma.func is _srlu_sigma)


def _base(activation: Activation) -> Activation:
    form = activation._form
    return form.base if isinstance(form, Affine) else activation

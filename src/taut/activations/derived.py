"""Activations made from others: bounded, weighted, tempered, mixed. All are still σ = φ'."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.activations.activation import Activation, Interval, Parameter, written
from taut.activations.table import exp, linear, resolve, sigmoid


@final
@dataclass(frozen=True, eq=False)
class Affine:
    """shift + scale·σ(u/temperature): what bounded, weighted and tempered activations are.

    With p = (z − shift)/scale: φ → shift·u + scale·temperature·φ(u/temperature), u(z) →
    temperature·u(p), ψ → scale·temperature·ψ(p). The form is closed under composition.
    """

    base: Activation
    shift: Parameter = 0.0
    scale: Parameter = 1.0
    temperature: Parameter = 1.0
    range: Interval | None = None  # known better than shift + scale·(range of the base)

    @cached_property
    def ends(self) -> Interval:
        """The range."""
        if self.range is not None:
            return self.range
        ends = (self.base.range.lower, self.base.range.upper)
        lower, upper = (self.shift + self.scale * end for end in ends)
        return Interval(lower, upper)

    def _like(self, x: Tensor) -> tuple[Any, Any, Any]:
        shift, scale, temperature = (
            p.to(dtype=x.dtype, device=x.device) if isinstance(p, Tensor) else p
            for p in (self.shift, self.scale, self.temperature)
        )
        return shift, scale, temperature

    def sigma(self, u: Tensor) -> Tensor:
        shift, scale, temperature = self._like(u)
        z = shift + scale * self.base.sigma(u / temperature)
        # Rounding may leave the range by a digit of the last place.
        return z.clamp(*self.ends.bounds(z)) if self.base.range.bounded else z

    def slope(self, u: Tensor) -> Tensor:
        _, scale, temperature = self._like(u)
        return self.base.slope(u / temperature) * (scale / temperature)

    def phi(self, u: Tensor) -> Tensor:
        shift, scale, temperature = self._like(u)
        return shift * u + scale * temperature * self.base.phi(u / temperature)

    def inverse(self, z: Tensor) -> Tensor:
        return self._like(z)[2] * self.base.inverse(self._unscaled(z))

    def psi(self, z: Tensor) -> Tensor:
        _, scale, temperature = self._like(z)
        return scale * temperature * self.base.psi(self._unscaled(z))

    def _unscaled(self, z: Tensor) -> Tensor:
        shift, scale, _ = self._like(z)
        p = (z - shift) / scale
        if not self.base.range.bounded:
            return p
        # The ends go to the ends exactly, and so does what is next to them and only rounding puts
        # beyond, where no logarithms are.
        (lower, upper), (low, high) = self.ends.bounds(z), self.base.range.bounds(z)
        p = torch.where((z == upper) | ((z < upper) & (p > high)), high, p)
        return torch.where((z == lower) | ((z > lower) & (p < low)), low, p)

    def activation(self, name: str) -> Activation:
        """This form as an activation."""
        numbers = self.shift, self.scale, self.temperature, self.ends.lower, self.ends.upper
        return Activation(
            name,
            self.sigma,
            self.slope,
            self.phi,
            self.inverse,
            self.psi,
            self.ends,
            _form=self,
            _written=written("affine", name, self.base, *numbers),
        )


def _derive(
    name: str, activation: str | Activation, shift: Any, scale: Any, temperature: Any
) -> Activation:
    activation = resolve(activation)
    inner = _affine(activation)
    lower, upper = (shift + scale * end for end in (inner.ends.lower, inner.ends.upper))
    return Affine(
        inner.base,
        shift + scale * inner.shift,
        scale * inner.scale,
        temperature * inner.temperature,
        Interval(lower, upper),
    ).activation(f"{name}({activation.name})")


def _parameter(name: str, value: Any) -> Parameter:
    if value is None:
        raise TypeError(f"{name} must be a number; got None. An open end is float('inf').")
    if not isinstance(value, (Tensor, int, float)):  # a list, or an array
        value = torch.as_tensor(value, dtype=torch.float64)
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and the projection has none for the parameters of "
                f"its activation. Pass {name}.detach()."
            )
        if value.ndim > 1:
            raise ValueError(f"{name} must be a number or a (K,) tensor; got {tuple(value.shape)}.")
        value = value.detach().to(torch.float64, copy=True)  # what is edited later is not this
        return value if value.ndim else value.item()
    return float(value)


def _all(condition: bool | Tensor) -> bool:
    return bool(condition.all()) if isinstance(condition, Tensor) else condition


def _positive(name: str, value: Any) -> Parameter:
    parameter = _parameter(name, value)
    if not _all((parameter > 0) & (parameter < math.inf)):
        raise ValueError(f"{name} must be positive and finite everywhere; got {value!r}.")
    return parameter


def bounded(
    lower: float | Float[Tensor, "K"] | Sequence[float],
    upper: float | Float[Tensor, "K"] | Sequence[float],
) -> Activation:
    """A sigmoid onto (lower, upper): lower + (upper − lower)·sigmoid(u).

    With an end at infinity it is an exponential from the other, lower + eᵘ or upper − e⁻ᵘ; with
    both, a line. An output whose two ends are the same is fixed there: a generator that is off.

    >>> bounded(-1.0, 3.0).sigma(torch.tensor([0.0]))
    tensor([1.])
    >>> bounded([0.0, 2.0], [math.inf, 2.0]).sigma(torch.tensor([0.0, 5.0]))
    tensor([1., 2.])
    """
    low, high = _parameter("lower", lower), _parameter("upper", upper)
    if not _all((low <= high) & (low < math.inf) & (high > -math.inf)):
        raise ValueError(
            f"bounded needs lower ≤ upper everywhere; got lower={lower!r}, upper={upper!r}."
        )
    if _all((high - low) < math.inf):
        return Affine(sigmoid, low, high - low, range=Interval(low, high)).activation("bounded")
    # Numbers become float64, whatever the default dtype is: an end keeps its digits.
    ends = torch.broadcast_tensors(*(torch.as_tensor(x, dtype=torch.float64) for x in (low, high)))
    forms = [_between(*pair) for pair in torch.stack(ends, -1).reshape(-1, 2).tolist()]
    return forms[0] if ends[0].ndim == 0 else mixed(forms)


def _between(lower: float, upper: float) -> Activation:
    """The `bounded` of one output."""
    ends = Interval(lower, upper)
    if upper - lower < math.inf:
        return bounded(lower, upper)
    if lower > -math.inf:
        return Affine(exp, lower, range=ends).activation("bounded")
    if upper < math.inf:
        return Affine(exp, upper, -1.0, -1.0, range=ends).activation("bounded")
    return linear


def weighted(
    activation: str | Activation, weights: float | Float[Tensor, "K"] | Sequence[float]
) -> Activation:
    """d·σ(u), weights d > 0: for example design weights of a survey.

    >>> weighted("exp", 2.0).sigma(torch.tensor([0.0]))
    tensor([2.])
    """
    return _derive("weighted", activation, 0.0, _positive("weights", weights), 1.0)


def tempered(
    activation: str | Activation, temperature: float | Float[Tensor, "K"] | Sequence[float]
) -> Activation:
    """σ(u/τ), temperature τ > 0: a small τ is a hard decision.

    >>> tempered("linear", 0.5).sigma(torch.tensor([1.0]))
    tensor([2.])
    """
    return _derive("tempered", activation, 0.0, 1.0, _positive("temperature", temperature))


@final
@dataclass(frozen=True, eq=False)
class Mixture:
    """Activations of disjoint sets of outputs, one call for each base."""

    members: tuple[Activation, ...]
    places: tuple[Tensor, ...]
    order: Tensor

    def __call__(self, x: Tensor, function: str) -> Tensor:
        if x.shape[-1] != len(self.order):
            raise ValueError(
                f"this mixed activation has {len(self.order)} outputs; got a tensor of shape "
                f"{tuple(x.shape)}, whose last dimension is {x.shape[-1]}."
            )
        parts = [
            getattr(member, function)(x[..., place.to(x.device)])
            for member, place in zip(self.members, self.places, strict=True)
        ]
        return torch.cat(parts, dim=-1)[..., self.order.to(x.device)]

    def activation(self) -> Activation:
        """This mixture as an activation."""
        lower, upper = torch.zeros(2, len(self.order), dtype=torch.float64)
        for member, place in zip(self.members, self.places, strict=True):
            lower[place], upper[place] = member.range.bounds(lower)
        return Activation(
            name="mixed",
            sigma=partial(self, function="sigma"),
            slope=partial(self, function="slope"),
            phi=partial(self, function="phi"),
            inverse=partial(self, function="inverse"),
            psi=partial(self, function="psi"),
            range=Interval(lower, upper),
            _form=self,
            _written=written("mixed", *self.members, *self.places),
        )


def mixed(activations: Sequence[str | Activation]) -> Activation:
    """Each output its own activation.

    >>> mixed(["exp", "linear"]).sigma(torch.tensor([0.0, 5.0]))
    tensor([1., 5.])
    """
    if isinstance(activations, str) or len(activations) == 0:
        raise ValueError(f"mixed needs one activation for each output; got {activations!r}.")
    forms = [_affine(resolve(a)) for a in activations]
    for k, form in enumerate(forms):
        parameters = (form.shift, form.scale, form.temperature, form.base.range.lower)
        if any(isinstance(p, Tensor) for p in parameters):
            raise ValueError(
                f"mixed: the activation of output {k} is itself one for many outputs; "
                "give each output an activation with numbers of its own."
            )
    bases: dict[Activation, list[int]] = {}
    for k, form in enumerate(forms):
        bases.setdefault(form.base, []).append(k)
    members = tuple(_stack([forms[k] for k in place]) for place in bases.values())
    places = tuple(torch.tensor(place) for place in bases.values())
    return Mixture(members, places, torch.argsort(torch.cat(places))).activation()


def _stack(forms: list[Affine]) -> Activation:
    base = forms[0].base
    shift, scale, temperature = (
        torch.tensor([getattr(form, name) for form in forms], dtype=torch.float64)
        for name in ("shift", "scale", "temperature")
    )
    if bool(((shift == 0) & (scale == 1) & (temperature == 1)).all()):
        return base
    lower, upper = (
        torch.tensor([getattr(form.ends, name) for form in forms], dtype=torch.float64)
        for name in ("lower", "upper")
    )
    return Affine(base, shift, scale, temperature, Interval(lower, upper)).activation(base.name)


def _affine(activation: Activation) -> Affine:
    form = activation._form
    return form if isinstance(form, Affine) else Affine(activation)

"""What an activation is: one row of the paper's Table 1."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast, final

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]
Parameter = float | Tensor  # a number, or one number for each coordinate: shape (K,)


@final
class _Pointwise(torch.autograd.Function):
    """y = f(x) elementwise, with the derivative written down instead of traced."""

    @staticmethod
    def forward(x: Tensor, f: Elementwise, derivative: Elementwise) -> Tensor:
        return f(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.derivative = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.derivative(x), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, x: Tensor, f: Elementwise, derivative: Elementwise
    ) -> tuple:
        # Parameters of a row belong to the last dimension, so the mapped one goes to the front.
        return _Pointwise.apply(x.movedim(in_dims[0], 0), f, derivative), 0


@final
@dataclass(frozen=True, eq=False)
class Interval:
    """The open interval (lower, upper); each end a number or a (K,) tensor.

    >>> Interval(0.0, 1.0)
    Interval(lower=0.0, upper=1.0)
    """

    lower: Parameter
    upper: Parameter

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both ends as tensors with the dtype and device of `like`."""
        return (
            torch.as_tensor(self.lower, dtype=like.dtype, device=like.device),
            torch.as_tensor(self.upper, dtype=like.dtype, device=like.device),
        )

    @cached_property
    def bounded(self) -> bool:
        """Are both ends finite, everywhere?

        >>> Interval(0.0, 1.0).bounded, Interval(0.0, math.inf).bounded
        (True, False)
        """
        width = torch.as_tensor(self.upper) - torch.as_tensor(self.lower)
        return bool(width.isfinite().all())

    @cached_property
    def positive(self) -> bool:
        """Is no number in it negative?

        >>> Interval(0.0, 1.0).positive, Interval(-1.0, 1.0).positive
        (True, False)
        """
        return bool((torch.as_tensor(self.lower) >= 0).all())

    def contains(self, z: Tensor) -> Tensor:
        """Elementwise: is z in the *closed* interval?

        >>> Interval(0.0, 1.0).contains(torch.tensor([0.0, 0.5, 2.0]))
        tensor([ True,  True, False])
        """
        lower, upper = self.bounds(z)
        return (lower <= z) & (z <= upper)


@final
@dataclass(frozen=True, eq=False)
class Activation:
    """One row of the table. All functions are elementwise torch functions.

    >>> import taut
    >>> taut.activations.sigmoid.sigma(torch.tensor([0.0]))
    tensor([0.5000])
    >>> taut.activations.sigmoid.bregman(torch.tensor([1.0]), torch.tensor([0.5]))  # log 2
    tensor([0.6931])
    """

    name: str
    sigma: Elementwise
    slope: Elementwise
    phi: Elementwise
    inverse: Elementwise
    psi: Elementwise
    range: Interval
    form: "Affine | None" = field(default=None, repr=False)  # how a derived row was made
    straight: bool = field(default=False, repr=False)  # is σ a line? Then σ' knows nothing of u
    # Rows for some coordinates each, where that is what this row is.
    parts: "tuple[tuple[Activation, Tensor], ...] | None" = field(default=None, repr=False)

    def output(self, u: Tensor) -> Tensor:
        """σ(u) whose derivative is `slope`, which keeps its digits where σ has saturated.

        >>> import taut
        >>> u = torch.tensor([40.0], dtype=torch.float64, requires_grad=True)
        >>> taut.activations.sigmoid.output(u).backward()
        >>> bool(u.grad > 0)  # torch.sigmoid gives 0 here
        True
        """
        return pointwise(self.sigma, self.slope, u)

    def integral(self, u: Tensor) -> Tensor:
        """φ(u) whose derivative is `output`.

        >>> import taut
        >>> taut.activations.linear.integral(torch.tensor([2.0]))
        tensor([2.])
        """
        return pointwise(self.phi, self.output, u)

    def divergence(self, y: Tensor, u: Tensor) -> Tensor:
        """B(y‖σ(u)) elementwise, from the linear predictor u: ψ(y) − y·u + φ(u) ≥ 0.

        >>> import taut
        >>> taut.activations.linear.divergence(torch.tensor([1.0]), torch.tensor([3.0]))
        tensor([2.])
        """
        value = pointwise(self.psi, self.inverse, y) - y * u + self.integral(u)
        # Rounding can leave −1e-17 where y = σ(u); lift the value and keep its derivatives.
        return value + value.detach().clamp(max=0).neg()

    def bregman(self, z: Tensor, v: Tensor) -> Tensor:
        """B(z‖v) elementwise, both arguments outputs (not linear predictors).

        >>> import taut
        >>> taut.activations.exp.bregman(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
        tensor([0., 0.])
        """
        u = self.inverse(v)
        at_end = u.isinf()
        inner = self.divergence(z, torch.where(at_end, torch.zeros_like(u), u))
        beyond = torch.where(z == v, torch.zeros_like(inner), torch.full_like(inner, math.inf))
        return torch.where(at_end, beyond, inner)


def pointwise(f: Elementwise, derivative: Elementwise, x: Tensor) -> Tensor:
    """f(x) with `derivative(x)` as its derivative, which must itself be differentiable."""
    return cast(Tensor, _Pointwise.apply(x, f, derivative))


@final
@dataclass(frozen=True, eq=False)
class Affine:
    """shift + scale·σ(u/temperature): the one form of bounded, weighted and tempered rows.

    With p = (z − shift)/scale: φ → shift·u + scale·temperature·φ(u/temperature), u(z) →
    temperature·u(p), ψ → scale·temperature·ψ(p). The form is closed under composition.
    """

    row: Activation
    shift: Parameter = 0.0
    scale: Parameter = 1.0
    temperature: Parameter = 1.0
    range: Interval | None = None  # known better than shift + scale·(range of the row)

    @cached_property
    def ends(self) -> Interval:
        """The range."""
        if self.range is not None:
            return self.range
        ends = (self.row.range.lower, self.row.range.upper)
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
        z = shift + scale * self.row.sigma(u / temperature)
        # Rounding may leave the range by a digit of the last place.
        return z.clamp(*self.ends.bounds(z)) if self.row.range.bounded else z

    def slope(self, u: Tensor) -> Tensor:
        _, scale, temperature = self._like(u)
        return self.row.slope(u / temperature) * (scale / temperature)

    def phi(self, u: Tensor) -> Tensor:
        shift, scale, temperature = self._like(u)
        return shift * u + scale * temperature * self.row.phi(u / temperature)

    def inverse(self, z: Tensor) -> Tensor:
        return self._like(z)[2] * self.row.inverse(self._unscaled(z))

    def psi(self, z: Tensor) -> Tensor:
        _, scale, temperature = self._like(z)
        return scale * temperature * self.row.psi(self._unscaled(z))

    def _unscaled(self, z: Tensor) -> Tensor:
        shift, scale, _ = self._like(z)
        p = (z - shift) / scale
        if not self.row.range.bounded:
            return p
        # The ends go to the ends exactly: beyond them are no logarithms.
        (lower, upper), (low, high) = self.ends.bounds(z), self.row.range.bounds(z)
        return torch.where(z == lower, low, torch.where(z == upper, high, p))

    def activation(self, name: str) -> Activation:
        """This form as a row."""
        return Activation(
            name,
            self.sigma,
            self.slope,
            self.phi,
            self.inverse,
            self.psi,
            self.ends,
            form=self,
            straight=self.row.straight,
        )

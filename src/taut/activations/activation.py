"""What an activation is: a line of the paper's Table 1."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from taut.activations.derived import Affine, Mixture

Elementwise = Callable[[Tensor], Tensor]
Parameter = float | Tensor  # a number, or one number for each coordinate: shape (K,)


@final
class _Pointwise(torch.autograd.Function):
    """y = f(x) elementwise, with the derivative written down instead of traced."""

    @staticmethod
    def forward(x: Tensor, f: Elementwise, derivative: Elementwise) -> Tensor:
        return f(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.derivative = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.derivative(x), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent * ctx.derivative(x)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, f: Elementwise, derivative: Elementwise
    ) -> tuple[Any, ...]:
        # Parameters belong to the last dimension, so the mapped one goes to the front.
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
        ends = (torch.as_tensor(x, dtype=torch.float64) for x in (self.lower, self.upper))
        return all(bool(x.isfinite().all()) for x in ends)

    @cached_property
    def positive(self) -> bool:
        """Is no number in it negative?

        >>> Interval(0.0, 1.0).positive, Interval(-1.0, 1.0).positive
        (True, False)
        """
        return bool((torch.as_tensor(self.lower, dtype=torch.float64) >= 0).all())

    def contains(self, z: Tensor) -> Tensor:
        """Elementwise: is z in the *closed* interval?

        >>> Interval(0.0, 1.0).contains(torch.tensor([0.0, 0.5, 2.0]))
        tensor([ True,  True, False])
        """
        lower, upper = self.bounds(z)
        return (lower <= z) & (z <= upper)


@final
class Written(NamedTuple):
    """An activation as JSON. Of parameters that are tensors it has the lengths, in brackets."""

    text: str
    numbers: Tensor | None  # all of those, one after the other


def written(name: str, *parts: Any) -> Written | None:
    """What is `name`, made of these numbers, tensors, names and activations.

    >>> written("weighted", 2.0, torch.ones(3))
    Written(text='["weighted", 2.0, [3]]', numbers=tensor([1., 1., 1.], dtype=torch.float64))
    """
    texts, numbers = [json.dumps(name)], []
    for part in parts:
        if isinstance(part, Activation):
            if part._written is None:
                return None
            text, more = part._written
            numbers += [] if more is None else [more]
        elif isinstance(part, Tensor):
            text = f"[{part.numel()}]"
            numbers.append(part.detach().to("cpu", torch.float64))
        else:
            text = json.dumps(part)
        texts.append(text)
    return Written(f"[{', '.join(texts)}]", torch.cat(numbers) if numbers else None)


@final
@dataclass(frozen=True, eq=False)
class Activation:
    """σ and all that belongs to it. All functions are elementwise torch functions.

    >>> import taut
    >>> taut.activations.sigmoid.sigma(torch.tensor([0.0]))
    tensor([0.5000])
    >>> taut.activations.sigmoid.bregman(torch.tensor([1.0]), torch.tensor([0.5]))  # log 2
    tensor([0.6931])
    """

    name: str
    sigma: Elementwise
    """σ(u), increasing."""
    slope: Elementwise
    """σ'(u), with its digits also where σ has saturated."""
    phi: Elementwise
    """φ(u), the convex function with φ' = σ."""
    inverse: Elementwise
    """u(z) with σ(u) = z."""
    psi: Elementwise
    """ψ(z) = z·u(z) − φ(u(z)), finite at the ends of the range too."""
    range: Interval
    """The open interval of what σ(u) can be."""
    # How it was made from others, where it was: codes.py turns that into numbers.
    _form: "Affine | Mixture | None" = field(default=None, repr=False)
    # The same as text and numbers, from which codes.py makes it again; None for one's own.
    _written: "Written | None" = field(default=None, repr=False)

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

"""c(z) = [A z − b; h(z, *params)]: its value, its Jacobian J and the curvature S = Σ λ_i ∇²h_i.

`Surface` and `Patch` are for numbers; `jacobian` and `curvature` for derivatives of any order, and
under transforms.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.autograd import is_zero

#: h(z, *params): (N, K), and params with N in front, to (N, M).
Equations = Callable[..., Tensor]

_SMALLEST = 8  # outputs from which second derivatives are worth being kept
_AGREE = 1e-12  # of the size of its terms: how far the product of S with a direction may be off
_SWEEPS = 4  # that bring the entries of ∇²h to one size


@final
@dataclass(frozen=True, eq=False)
class Surface:
    """N samples of c, in float64; no derivatives are taken in A, b and params."""

    h: Equations
    params: tuple[Tensor, ...]
    A: Float[Tensor, "I K"] | Float[Tensor, "N I K"]
    b: Float[Tensor, "N I"]
    seconds: "Seconds" = field(default_factory=lambda: Seconds())

    def take(self, index: Int[Tensor, "n"]) -> "Surface":
        """The samples at `index`."""
        A = self.A if self.A.ndim == 2 else self.A[index]
        params = tuple(p[index] for p in self.params)
        return replace(self, params=params, A=A, b=self.b[index])

    def value(self, z: Float[Tensor, "N K"]) -> Float[Tensor, "N rows"]:
        """c(z)."""
        with torch.no_grad():
            return self._with_linear(z, self.h(z, *self.params))

    def at(self, z: Float[Tensor, "N K"]) -> "Patch":
        """c around z."""
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            return Patch(self, leaf, self.h(leaf, *self.params))

    def _with_linear(self, z: Tensor, h: Tensor) -> Tensor:
        if self.A.shape[-2] == 0:
            return h
        linear = z @ self.A.mT if self.A.ndim == 2 else (self.A @ z.unsqueeze(-1)).squeeze(-1)
        return torch.cat([linear - self.b, h], -1)


@final
@dataclass(frozen=True, eq=False)
class Patch:
    """c around one z of each sample, with the graph of h there."""

    surface: Surface
    z: Float[Tensor, "N K"]  # requires grad
    h: Float[Tensor, "N M"]  # depends on it

    @property
    def c(self) -> Float[Tensor, "N rows"]:
        return self.surface._with_linear(self.z.detach(), self.h.detach())

    def jacobian(self) -> Float[Tensor, "N rows K"]:
        """J."""
        J, A = _vectors(self.h, self.z, self._again(), ()), self.surface.A
        if A.shape[-2] == 0:
            return J
        return torch.cat([A.expand(len(J), *A.shape[-2:]), J], -2)

    def pull(self, multipliers: Float[Tensor, "N rows"]) -> Float[Tensor, "N K"]:
        """Jᵀλ, without J."""
        A = self.surface.A
        linear, own = multipliers[:, : A.shape[-2]], multipliers[:, A.shape[-2] :]
        (found,) = torch.autograd.grad(self.h, self.z, own, retain_graph=True)
        if A.shape[-2] == 0:
            return found
        return found + (linear @ A if A.ndim == 2 else (linear.unsqueeze(-2) @ A).squeeze(-2))

    def gradient(self, multipliers: Float[Tensor, "N M"]) -> Float[Tensor, "N K"]:
        """Jᵀλ of h alone, with its graph; `requires_grad` says whether it depends on z."""
        with torch.enable_grad():
            return torch.autograd.grad(self.h, self.z, multipliers, create_graph=True)[0]

    def curvature(self, multipliers: Float[Tensor, "N M"]) -> Float[Tensor, "N K K"] | None:
        """S, for the multipliers of h; None where h is linear."""
        gradient = self.gradient(multipliers)
        if not gradient.requires_grad:
            return None
        found = self.surface.seconds.curvature(self, gradient, multipliers)
        return found if found is not None else self.exact_curvature(gradient, multipliers)

    def exact_curvature(
        self, gradient: Tensor, multipliers: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N K K"]:
        """S from the gradient with its graph, by K derivatives."""
        return _vectors(gradient, self.z, self._again(), (multipliers,))

    def _again(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """h, or its gradient, and the z it is taken in, of so many copies of every sample."""

        def again(times: int, *multipliers: Tensor) -> tuple[Tensor, Tensor]:
            def tiled(x: Tensor) -> Tensor:
                return x.detach().repeat(times, *(1 for _ in x.shape[1:]))

            surface = self.surface
            with torch.enable_grad():
                z = tiled(self.z).requires_grad_()
                h = surface.h(z, *map(tiled, surface.params))
                for own in multipliers:
                    (h,) = torch.autograd.grad(h, z, tiled(own), create_graph=True)
            return h, z

        return again


def _vectors(y: Tensor, z: Tensor, again: Callable[..., Any], given: tuple[Any, ...]) -> Tensor:
    """dy/dz, sample by sample: (N, m, K)."""
    n, m = y.shape
    eye = torch.eye(m, dtype=y.dtype, device=y.device).unsqueeze(1).expand(m, n, m)
    try:
        (found,) = torch.autograd.grad(
            y, z, eye, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
    except (RuntimeError, UserWarning):
        # vmap has no rule for some functions: copies of the samples need none. For some it has a
        # slow way, with a warning, which is an error where the caller has made errors of warnings.
        y, z = again(m, *given)
        (found,) = torch.autograd.grad(y, z, eye.reshape(m * n, m), allow_unused=True)
        found = None if found is None else found.reshape(m, n, -1)
    if found is None or is_zero(found):
        return z.new_zeros(n, m, z.shape[-1])
    return found.detach().transpose(0, 1)


@final
class Seconds:
    """∇²h_i of one sample. In a quadratic h they are those of all, at every z: S = Σ λ_i ∇²h_i.

    Each use asks each sample whether they are, at its z and with its λ, by the product of S with a
    random direction; that costs a K-th part of S. Of another S, the product differs with
    probability 1, as the direction is drawn anew, whatever h is.
    """

    def __init__(self) -> None:
        self.found: Tensor | None = None
        self.size: Tensor | None = None  # of each output: z_k over it has second derivatives near 1
        self.useless: bool = False
        self.random: random.Random = random.Random()  # torch's random numbers are the caller's

    def curvature(self, patch: Patch, gradient: Tensor, multipliers: Tensor) -> Tensor | None:
        """S; None where it has to be worked out for each sample."""
        (n, m), outputs = multipliers.shape, gradient.shape[-1]
        if self.useless or outputs < _SMALLEST or n < 2 * m:
            return None
        if self.found is None or self.size is None:
            self.found = _of_one(patch, m)
            self.size = _even(self.found.reshape(m, outputs, outputs))
        S = (multipliers @ self.found).reshape(n, outputs, outputs)
        numbers = [self.random.gauss(0.0, 1.0) for _ in range(outputs)]
        direction = self.size * torch.tensor(numbers, dtype=S.dtype, device=S.device)
        direction = direction.expand(n, outputs)
        (right,) = torch.autograd.grad(gradient, patch.z, direction, retain_graph=True)
        ours = (S @ direction.unsqueeze(-1)).squeeze(-1)
        terms = (multipliers.abs() @ self.found.abs()).reshape(S.shape)
        terms = (terms @ direction.abs().unsqueeze(-1)).squeeze(-1)
        if bool(((right - ours).abs() <= _AGREE * terms).all()):
            return S
        self.useless, self.found = True, None
        return None


def _even(H: Float[Tensor, "M K K"]) -> Float[Tensor, "K"]:
    """s, so that the largest |s_k H_kj s_j| of each row is near 1 (Ruiz); 1 where H has nothing.

    Outputs may have units, and second derivatives of 1e12 hide those of 1e-12.
    """
    size = H.abs()
    size = (size / size.amax((-2, -1), keepdim=True).clamp_min(1e-300)).amax(0)
    s = torch.ones_like(size[0])
    for _ in range(_SWEEPS):
        largest = (s.unsqueeze(-1) * size * s).amax(-1)
        s = s * torch.where(largest > 0, largest, 1).rsqrt()
    return s


def _of_one(patch: Patch, m: int) -> Float[Tensor, "M KK"]:
    """∇²h_i of the first sample, flat: those of M copies of it, one multiplier in each."""
    first = torch.zeros(m, dtype=torch.long, device=patch.z.device)
    own = patch.surface.take(first).at(patch.z.detach()[first])
    one = torch.eye(m, dtype=patch.z.dtype, device=patch.z.device)
    gradient = own.gradient(one)
    if not gradient.requires_grad:
        return patch.z.new_zeros(m, patch.z.shape[-1] ** 2)
    return own.exact_curvature(gradient, one).reshape(m, -1)


def jacobian(h: Equations, z: Tensor, params: Sequence[Tensor]) -> Float[Tensor, "N M K"]:
    """J of h, differentiable in z and params, and under transforms."""
    value, pull, *_ = torch.func.vjp(lambda x: h(x, *params), z)
    n, m = value.shape
    eye = torch.eye(m, dtype=z.dtype, device=z.device).unsqueeze(1).expand(m, n, m)
    return torch.func.vmap(pull)(eye)[0].movedim(0, 1)


def pulled(h: Equations, z: Tensor, params: Sequence[Tensor], multipliers: Tensor) -> Tensor:
    """Jᵀλ of h, differentiable in all of them, and under transforms."""
    return torch.func.vjp(lambda x: h(x, *params), z)[1](multipliers)[0]


def curvature(
    h: Equations, z: Tensor, params: Sequence[Tensor], multipliers: Tensor
) -> Float[Tensor, "N K K"]:
    """S, differentiable in all of them, and under transforms."""
    _, pull, *_ = torch.func.vjp(lambda x: pulled(h, x, params, multipliers), z)
    n, outputs = z.shape
    eye = torch.eye(outputs, dtype=z.dtype, device=z.device).unsqueeze(1)
    return torch.func.vmap(pull)(eye.expand(outputs, n, outputs))[0].movedim(0, 1)

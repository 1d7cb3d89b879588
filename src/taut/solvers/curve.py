"""What the lanes of the nonlinear solver share: c, σ and v in float64, and when c counts as 0."""

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.activations import Activation
from taut.backends import Rules
from taut.problems.surface import Patch, Surface
from taut.systems.saddle import back, is_minimum, times

EPS = 2.0**-52
# Around z: directions, d over z, and how many times what is measured there c may be.
_PROBES, _NEAR, _NOISE = 3, 3e-5, 16.0
REACH = 5.0  # u moves at most so many of its units in one step: σ is another function beyond


@final
class Scales(NamedTuple):
    """What c is measured by, equation by equation."""

    full: Float[Tensor, "n rows"]  # what is rounded in it
    cap: Float[Tensor, "n rows"]  # the same with a bound on λ: one that runs away buys little


@final
@dataclass(frozen=True, eq=False)
class Curve:
    """N samples, every number finite. Outputs that are held stay at `end`; it is NaN elsewhere."""

    surface: Surface
    activation: Activation
    v: Float[Tensor, "n K"]
    unit: Float[Tensor, "K"]  # of u: the temperature of σ; inf where σ is a line
    end: Float[Tensor, "n K"] | None
    target: float  # |c| over `full` that is enough
    floor: float  # |c| over `cap` that counts as rounding once it has stopped falling
    lines: int  # the outputs in which σ is a line

    @staticmethod
    def of(
        surface: Surface, activation: Activation, v: Tensor, unit: Tensor, rules: Rules
    ) -> "Curve":
        tol = rules.tol or 0.0
        tols, lines = (max(8 * EPS, tol), max(1e-12, tol)), int(unit.isinf().sum())
        return Curve(surface, activation, v, unit, None, *tols, lines)

    def take(self, index: Int[Tensor, "n"]) -> "Curve":
        """The samples at `index`."""
        end = None if self.end is None else self.end[index]
        return replace(self, surface=self.surface.take(index), v=self.v[index], end=end)

    def sigma(self, u: Tensor) -> Float[Tensor, "n K"]:
        z = self.activation.sigma(u)
        return z if self.end is None else torch.where(self.end.isnan(), z, self.end)

    def slope(self, u: Tensor) -> Float[Tensor, "n K"]:
        w = self.activation.slope(u)
        return w if self.end is None else torch.where(self.end.isnan(), w, 0)

    def objective(self, z: Tensor) -> Float[Tensor, "n"]:
        """f = Σψ(z) − vᵀz: B(z‖σ(v)) up to a constant."""
        return (self.activation.psi(z) - self.v * z).sum(-1)

    def sizes(self, u: Tensor, r: Tensor) -> Float[Tensor, "n K"] | Float[Tensor, "n 1"]:
        """What a length in the local metric is compared with, output by output or of all.

        Where σ is a line, which has no unit, the largest r|u| or r|v| of the sample: so numbers
        that are all a million times as large are solved alike. Elsewhere the unit of u is 1 or
        less, and more where r(|u| + |v|), whose rounding is that of z, is more.
        """
        size = r * torch.maximum(u.abs(), self.v.abs())
        if self.lines == u.shape[-1]:
            line = size.amax(-1, keepdim=True)
            return torch.where(line > 0, line, 1)
        other = torch.maximum(size, r * self.finite_unit).clamp_min(1)
        if self.lines == 0:
            return other
        line = size.where(self.unit.isinf(), 0).amax(-1, keepdim=True)
        return torch.where(self.unit.isinf(), torch.where(line > 0, line, 1), other)

    def paces(self, sizes: Tensor, w: Tensor) -> Float[Tensor, "n K"]:
        """What z moves with u by its unit, w times that; r times `sizes` where σ is a line."""
        if self.lines == 0:
            return w * self.unit
        line = w.sqrt() * sizes
        if self.lines == w.shape[-1]:
            return line
        return torch.where(self.unit.isinf(), line, w * self.finite_unit)

    def steps(self, du: Tensor) -> Float[Tensor, "n"]:
        """The largest |du| in units; held outputs and lines do not count."""
        sizes = du.abs() / self.unit
        if self.end is not None:
            sizes = torch.where(self.end.isnan(), sizes, 0)
        return sizes.amax(-1)

    @cached_property
    def finite_unit(self) -> Float[Tensor, "K"]:
        return torch.where(self.unit.isinf(), 1, self.unit)

    def scales(
        self, J: Tensor, z: Tensor, w: Tensor, u: Tensor, multipliers: Tensor, sizes: Tensor
    ) -> Scales:
        """|b| + |J|(|z| + w(|u| + |v| + |J|ᵀ|λ|)), and with the unit of u in place of |J|ᵀ|λ|.

        Without the last, z_k = 0 with v_k = 0 would have a scale of 0. Where σ is a line, it is
        |J|ᵀ|λ| up to the largest u or v of the sample.
        """
        size = J.abs()
        own = times(size, z.abs() + w * (u.abs() + self.v.abs()))
        own = self._with_b(own).clamp_min(torch.finfo(own.dtype).tiny)
        pulled = w * back(size, multipliers.abs())
        bound = paces = self.paces(sizes, w)
        if self.lines:
            bound = torch.minimum(paces, pulled)
            bound = bound if self.lines == w.shape[-1] else bound.where(self.unit.isinf(), paces)
        return Scales(own + times(size, pulled), own + times(size, bound))

    def noisy(self, which: Bool[Tensor, "n"], u: Tensor) -> Bool[Tensor, "n"]:
        """Of which of these samples is c rounding of numbers inside h, as in exp(z) − 1 near z = 0?

        J and z do not tell how large such numbers are. Measured by the odd part of c around z,
        which is Jd but for d³; and c is to be rounding beside a u of size 1.
        """
        index = which.nonzero().squeeze(-1)
        if self.lines == 0 or len(index) == 0:
            return torch.zeros_like(which)
        part, u = self.take(index), u[index]
        z, w = part.sigma(u), part.slope(u)
        patch = part.surface.at(z)
        c, J = patch.c, patch.jacobian()
        scale = times(J.abs(), z.abs() + w * (u.abs() + part.v.abs() + part.finite_unit))
        noise, source = torch.zeros_like(c), random.Random(0)
        for _ in range(_PROBES):
            signs = [source.choice((-_NEAR, _NEAR)) for _ in range(z.shape[-1])]
            d = z * torch.tensor(signs, dtype=z.dtype, device=z.device)
            odd = part.surface.value(z + d) - part.surface.value(z - d) - 2 * times(J, d)
            noise = torch.maximum(noise, odd.abs().nan_to_num(0.0))
        fine = (c.abs() <= _NOISE * noise).all(-1)
        fine = fine & (worst(c, part._with_b(scale)) <= part.floor)
        return torch.zeros_like(which).index_copy_(0, index, fine)

    def _with_b(self, terms: Tensor) -> Float[Tensor, "n rows"]:
        """`terms`, those of A z = b with |b|; in place."""
        rows = self.surface.b.shape[-1]
        if rows:
            terms[:, :rows] += self.surface.b.abs()
        return terms

    def own(self, multipliers: Tensor) -> Float[Tensor, "n M"]:
        """Those of h."""
        return multipliers[:, self.surface.A.shape[-2] :]

    def curvature(self, patch: Patch, multipliers: Tensor) -> Float[Tensor, "n K K"] | None:
        """S."""
        return patch.curvature(self.own(multipliers))

    def strict(self, u: Tensor, multipliers: Tensor) -> Bool[Tensor, "n"]:
        """Is z a strict minimum among its neighbours?"""
        patch = self.surface.at(self.sigma(u))
        S = self.curvature(patch, multipliers)
        return is_minimum(patch.jacobian(), self.slope(u).sqrt(), S)


def worst(c: Tensor, scale: Tensor) -> Float[Tensor, "n"]:
    """The largest |c| over its scale; infinite where it is not a number."""
    ratio = c.abs() / scale
    return torch.where(ratio.isfinite(), ratio, torch.inf).amax(-1)


@final
class Attempt(NamedTuple):
    """Where a lane has left the samples."""

    u: Float[Tensor, "n K"]
    multipliers: Float[Tensor, "n rows"]
    done: Bool[Tensor, "n"]
    iterations: Int[Tensor, "n"]
    off: Float[Tensor, "n"]  # the largest |c| over its cap

    @staticmethod
    def start(u: Tensor, multipliers: Tensor) -> "Attempt":
        """Nothing is done."""
        n, device = len(u), u.device
        done = torch.zeros(n, dtype=torch.bool, device=device)
        count = torch.zeros(n, dtype=torch.long, device=device)
        return Attempt(u.clone(), multipliers.clone(), done, count, u.new_full((n,), torch.inf))

    def write(self, place: Int[Tensor, "n"], *found: Tensor) -> None:
        """These fields of the samples at `place`, in order; in place."""
        for own, new in zip(self, found, strict=True):
            own.index_copy_(0, place, new.to(own.dtype))

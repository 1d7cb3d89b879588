"""Levenberg–Marquardt on ½‖c/s‖²: has the violation a minimum above 0 here?"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.solvers.curve import REACH, Curve
from taut.systems.saddle import Rows, back, diagonal, length

_STEPS = 100
_GAIN = 1e-4  # of ‖c/s‖², to first order, that moving every u by REACH can still gain
_NONE = 1e-20  # ‖c/s‖² that is none: there was a solution after all


def least_violation(curve: Curve, u: Float[Tensor, "n K"]) -> Bool[Tensor, "n"]:
    """Where no step gains: at an interior stationary point, or with z at the end of its range."""
    patch = curve.surface.at(curve.sigma(u))
    scaled = patch.jacobian() * curve.slope(u).sqrt().unsqueeze(-2)
    sizes = curve.sizes(u, curve.slope(u).sqrt())
    s = length(scaled) * sizes.amax(-1, keepdim=True) + patch.c.abs()  # fixed from here on
    s = torch.where(s > 0, s, s.amax(-1, keepdim=True).clamp_min(1e-300))
    δ = torch.full_like(u[:, 0], 1e-3)
    stuck = torch.zeros_like(δ, dtype=torch.bool)
    place = torch.arange(len(u), device=u.device)
    for _ in range(_STEPS):
        patch, w = curve.surface.at(curve.sigma(u)), curve.slope(u)
        c, J = patch.c / s, patch.jacobian() / s.unsqueeze(-1)
        size = c.square().sum(-1)
        gain = REACH * (curve.paces(sizes, w) * back(J, c).abs()).sum(-1)
        feasible = size <= _NONE
        over = feasible | (gain <= _GAIN * size)
        stuck[place[over & ~feasible]] = True
        left = (~over).nonzero().squeeze(-1)
        if len(left) == 0:
            break
        if len(left) < len(place):
            curve, place = curve.take(left), place[left]
            u, s, δ, w, c, J, size, sizes = (x[left] for x in (u, s, δ, w, c, J, size, sizes))
        scaled = J * w.sqrt().unsqueeze(-2)
        gram = scaled @ scaled.mT
        diagonal(gram).add_(δ.unsqueeze(-1) * (1e-300 + diagonal(gram).amax(-1, keepdim=True)))
        du = -back(J, Rows.of(gram).solve(c))
        du = du * (REACH / curve.steps(du).clamp_min(1e-300)).clamp(max=1).unsqueeze(-1)
        after = (curve.surface.value(curve.sigma(u + du)) / s).square().sum(-1)
        better = after < size
        u = torch.where(better.unsqueeze(-1), u + du, u)
        δ = torch.where(better, 0.3 * δ, 5 * δ).clamp(1e-12, 1e12)
    return stuck

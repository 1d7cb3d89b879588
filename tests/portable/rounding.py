"""How far two answers to the same problem may lie apart, if each was rounded in its own way.

First-order bounds, sample by sample and number by number, with the constants of the rounding
analysis of sums: n operations lose at most n·eps of the sizes of what is added. Everything is
evaluated at one of the answers, in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import taut
from taut.backends import Rules

EPS = 2.0**-52
STUCK = 4 * Rules().unit  # newton.h: what the kernel accepts of a sample that makes no progress
CURVED = 1.5  # w changes by less than this factor where u changes by less than 0.1


@dataclass(frozen=True, eq=False)
class Scene:
    """A plan of the kernel: the rows that Newton works with, σ, and how numbers are stored."""

    A: Tensor  # (I, K), all rows
    kept: Tensor  # (I,), the rows that Newton works with
    activation: taut.Activation
    shift: Tensor  # (K,): σ is shift + scale·(one of the table), at u/temperature
    size: Tensor  # (K,): scale·temperature
    stored: float  # eps of the dtype that answers are returned in

    @property
    def steps(self) -> float:
        """Σ over outputs, Σ over rows, and some thirty operations in σ; n·eps."""
        return (sum(self.A.shape) + 30) * EPS

    def rounded(self, x: Tensor) -> Tensor:
        """What is lost when both answers are stored."""
        return self.stored * x.abs() + torch.finfo(torch.float32).tiny * (self.stored > EPS)


def _inverse(scene: Scene, w: Tensor) -> tuple[Tensor, Tensor]:
    """|(A diag(w) Aᵀ)⁻¹| over the rows kept, and what rounding changes of the matrix."""
    A = scene.A[scene.kept]
    matrix = torch.einsum("ik,nk,jk->nij", A, w, A)
    root = matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = root[:, :, None] * root[:, None, :]
    # Scaled to a diagonal of 1 before it is inverted, as slopes may be as small as 1e-100.
    inverse = torch.linalg.inv(matrix / scale).abs() / scale
    # Cholesky's backward error is n·eps·|L||Lᵀ|, and no entry of that is larger than this.
    return inverse, scene.steps * scale


def of_solve(
    scene: Scene, v: Tensor, b: Tensor, multipliers: Tensor, u: Tensor, z: Tensor,
    target: float, share: float,
) -> dict[str, Tensor]:  # fmt: skip
    """λ, u, z and residual. Each answer leaves a residual that the kernel calls solved."""
    size = scene.A.abs()
    w = scene.activation.slope(u)
    reached = v.abs() + multipliers.abs() @ size  # the numbers that u is made of
    lost = z.abs() + 2 * scene.shift.abs() + w * reached
    scale = b.abs() + lost @ size.mT
    wanted = b.abs() + share * z.abs() @ size.mT
    residual = torch.maximum(target * wanted, STUCK * scale) + scene.steps * scale
    inverse, _ = _inverse(scene, w)
    apart = torch.zeros_like(b)
    apart[:, scene.kept] = CURVED * torch.einsum("nij,nj->ni", inverse, 2 * residual[:, scene.kept])
    moved = apart @ size + 2 * scene.steps * reached
    stored = residual + scene.stored * z.abs() @ size.mT * (scene.stored > EPS)
    return {
        "multipliers": apart + scene.rounded(multipliers),
        "u": moved + scene.rounded(u),
        "z": CURVED * w * moved + 2 * scene.steps * lost + scene.rounded(z),
        "residual": 2 * stored.amax(-1) + scene.stored * stored.amax(-1),
    }


def of_backward(
    scene: Scene, u: Tensor, grads: list[Tensor | None], dv: Tensor, db: Tensor
) -> dict[str, Tensor]:
    """∂v and ∂b, with s = (A diag(w) Aᵀ)⁻¹(A g + g_λ) and ∂v = g − w∘Aᵀs."""
    size, w = scene.A[scene.kept].abs(), scene.activation.slope(u)
    g_multipliers, g_u, g_z = (0.0 if x is None else x.abs() for x in grads)
    g = g_u + w * g_z + torch.zeros_like(u)
    right = g @ size.mT + (g_multipliers + torch.zeros_like(db))[:, scene.kept]
    s = db[:, scene.kept].abs()
    inverse, changed = _inverse(scene, w)
    weighted = torch.einsum("ik,nk,jk->nij", size, w, size)
    error = scene.steps * right
    error = error + torch.einsum("nij,nj->ni", changed + scene.steps * weighted, s)
    apart = torch.zeros_like(db)
    apart[:, scene.kept] = 2 * torch.einsum("nij,nj->ni", inverse, error)
    moved = apart[:, scene.kept] @ size
    return {
        "dv": w * moved + 2 * scene.steps * (g + w * (s @ size)) + scene.rounded(dv),
        "db": apart + scene.rounded(db),
    }


def of_loss(
    scene: Scene, v: Tensor, b: Tensor, y: Tensor, u: Tensor, multipliers: Tensor, loss: Tensor
) -> dict[str, Tensor]:
    """Σψ(y) − yᵀv − bᵀλ + Σφ(u)."""
    psi, phi = scene.activation.psi(y).abs(), scene.activation.phi(u).abs()
    # Terms of ψ and φ that cancel: of the size of y, of shift·u, and 1 before they are scaled.
    hidden = y.abs() + (scene.shift * u).abs() + scene.size
    terms = (psi + phi + hidden + (y * v).abs()).sum(-1) + (b * multipliers).abs().sum(-1)
    return {"loss": 2 * scene.steps * terms + scene.rounded(loss)}


def of_divergence(scene: Scene, loss: Tensor) -> Tensor:
    """B(y‖z) in float32, some thirty operations in each term, none of which is negative."""
    return 30 * scene.stored * loss.abs() * (scene.stored > EPS)

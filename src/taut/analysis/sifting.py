"""Which equations of a sparse A are independent, for derivatives: seen from A Aᵀ alone."""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.analysis.basis import Plain
from taut.analysis.examine import unexamined
from taut.maps import LinearMap

# Combinations of unit equations shorter than this, as the eigenvalues of A Aᵀ tell it, may be
# nothing; they are if, multiplied with A itself, they are no longer than rounding.
_SHORT, _NOTHING = 1e-5, 1e-12


@final
@dataclass(frozen=True, eq=False)
class Sifted(Plain):
    """All equations but those in `out`, which the others imply; Aᵀ·null = 0."""

    out: Bool[Tensor, "I"]
    null: Float[Tensor, "I m"]

    @property
    def left_out(self) -> Bool[Tensor, "I"] | None:
        return self.out if self.null.shape[1] else None

    def project(self, x: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
        return x - (x @ self.null) @ self.null.mT

    @cached_property
    def metric(self) -> Float[Tensor, "I I"] | None:
        """|`outward` s|² = sᵀM s, M = 1 − N Nᵀ between the equations kept; M⁻¹ = RᵀR."""
        if self.left_out is None:
            return None
        square = torch.eye(len(self.out), dtype=self.null.dtype, device=self.null.device)
        kept = self.null.masked_fill(self.out.unsqueeze(-1), 0)
        triangle = torch.linalg.cholesky(square - kept @ kept.mT)
        return torch.linalg.solve_triangular(triangle, square, upper=False)

    def contradictory(
        self, b: Float[Tensor, "n I"], scale: Float[Tensor, "n I"], eps: float
    ) -> Bool[Tensor, "n"]:
        return ((b @ self.null).abs() > eps**0.5 * (scale @ self.null.abs())).any(-1)


def sift(A: LinearMap) -> Plain:
    """Look at a sparse A whose A Aᵀ can be formed.

    >>> from taut.maps import as_map
    >>> A = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.float64)
    >>> int(sift(as_map(A.to_sparse())).left_out.sum())
    1
    """
    ones = A.data.new_ones(1, A.shape[1])
    norms = A.gram_diagonal(ones)[0].sqrt()
    norms = norms.where(norms > 0, 1)
    values, vectors = torch.linalg.eigh(A.gram(ones)[0] / norms / norms.unsqueeze(-1))
    short = values < _SHORT**2
    null = vectors[:, short]
    condition = values[~short].min().rsqrt() if bool((~short).any()) else norms.new_ones(())
    out = torch.zeros(A.shape[0], dtype=torch.bool, device=norms.device)
    if null.shape[1]:
        if bool((A.adjoint((null / norms.unsqueeze(-1)).mT).norm(dim=-1) > _NOTHING).any()):
            return unexamined(A)  # nearly dependent equations: there is no saying which
        null = torch.linalg.qr(null / norms.unsqueeze(-1)).Q
        permutation = torch.lu_unpack(*torch.linalg.lu_factor(null))[0]
        out[permutation.argmax(0)[: null.shape[1]]] = True
    return Sifted(A, condition, out, null)

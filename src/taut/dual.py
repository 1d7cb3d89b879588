"""The one convex function the library is about.

D(λ)   = Σ_k φ(v_k + a_kᵀλ) − bᵀλ          convex in λ, one per sample
∇D(λ)  = A z − b,  z = σ(v + Aᵀλ)           the residual of the constraint
∇²D(λ) = A diag(σ'(u)) Aᵀ                   I×I
"""

from dataclasses import dataclass, replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from taut.activation import Activation
from taut.linear import LinearMap


@final
@dataclass(frozen=True, eq=False)
class Dual:
    """D for a batch of samples: `v` is (*batch, K), `b` is (*batch, I).

    >>> import torch, taut
    >>> A = taut.linear.DenseMap(torch.ones(1, 2))
    >>> D = Dual(taut.activations.exp, A, torch.zeros(2), torch.ones(1))
    >>> D.gradient(torch.zeros(1))  # A z − b = 1 + 1 − 1
    tensor([1.])
    """

    activation: Activation
    A: LinearMap
    v: Float[Tensor, "*batch K"]
    b: Float[Tensor, "*batch I"]

    def predictor(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch K"]:
        """u = v + Aᵀλ."""
        return self.A.shifted_adjoint(self.v, multipliers)

    def value(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch"]:
        """D(λ)."""
        u = self.predictor(multipliers)
        return self.activation.phi(u).sum(-1) - (self.b * multipliers).sum(-1)

    def residual(self, z: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I"]:
        """A z − b, the gradient of D where z = σ(u)."""
        return self.A.excess(z, self.b)

    def gradient(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch I"]:
        """∇D(λ)."""
        return self.residual(self.activation.sigma(self.predictor(multipliers)))

    def hessian(self, u: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I I"]:
        """∇²D at the linear predictor u."""
        return self.A.gram(self.activation.slope(u))

    def rows(self, index: Tensor) -> "Dual":
        """The samples at `index` of the (only) batch dimension."""
        return replace(self, A=self.A.rows(index), v=self.v[index], b=self.b[index])

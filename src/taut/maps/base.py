"""A matrix as an operator on batches: apply (A z), adjoint (Aᵀλ) and gram (A diag(w) Aᵀ)."""

from abc import ABC, abstractmethod

from jaxtyping import Float, Int
from torch import Tensor


class LinearMap(ABC):
    """A as an operator on N samples; `data` is the tensor that carries its gradient."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(I, K)."""
        return self.data.shape[-2], self.data.shape[-1]

    @property
    def shared(self) -> bool:
        """Is there one matrix for all samples?"""
        return True

    @property
    def sparse(self) -> bool:
        """Does `data` hold the non-zeros only?"""
        return False

    @property
    def iterative(self) -> bool:
        """Is A diag(w) Aᵀ too large to be formed?"""
        return False

    @abstractmethod
    def over(self, data: Tensor) -> "LinearMap":
        """The same map with other numbers."""

    def scaled(self, scale: Float[Tensor, "*n I"]) -> "LinearMap":
        """diag(scale) A."""
        return self.over(scale.unsqueeze(-1) * self.data)

    def dense(self) -> Float[Tensor, "*n I K"]:
        """The matrix itself."""
        return self.data

    @abstractmethod
    def apply(self, z: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I"]:
        """A z."""

    @abstractmethod
    def adjoint(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch K"]:
        """Aᵀλ."""

    def shifted_adjoint(
        self, v: Float[Tensor, "*batch K"], multipliers: Float[Tensor, "*batch I"]
    ) -> Float[Tensor, "*batch K"]:
        """v + Aᵀλ."""
        return v + self.adjoint(multipliers)

    def excess(
        self, z: Float[Tensor, "*batch K"], b: Float[Tensor, "*batch I"]
    ) -> Float[Tensor, "*batch I"]:
        """A z − b."""
        return self.apply(z) - b

    @abstractmethod
    def gram(self, w: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I I"]:
        """A diag(w) Aᵀ."""

    def gram_diagonal(self, w: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I"]:
        """The diagonal of A diag(w) Aᵀ."""
        return self.over(self.data.square()).apply(w)

    @abstractmethod
    def outer(self, left: Float[Tensor, "*batch I"], right: Float[Tensor, "*batch K"]) -> Tensor:
        """left rightᵀ in the shape of `data`, summed over samples that share A: its gradient."""

    @abstractmethod
    def abs(self) -> "LinearMap":
        """|A|, entry by entry: the scale of rounding in A z."""

    @abstractmethod
    def only(self, rows: Int[Tensor, "m"]) -> "LinearMap":
        """Some of the rows, in that order; `rows` increases."""

    def norms(self) -> Float[Tensor, "*n I"]:
        """The length of each row."""
        return self.data.norm(dim=-1)

    @abstractmethod
    def largest(self) -> Float[Tensor, "*n I"]:
        """max|a| of each equation."""

    @abstractmethod
    def highest(self, u: Float[Tensor, "n K"]) -> Float[Tensor, "n I"]:
        """The largest u of the outputs in each equation."""

    @abstractmethod
    def joined(self, data: Tensor, dim: int | None, size: int, n: int) -> "LinearMap":
        """The map of `size` batches of n samples as one batch; vmap has mapped `dim` of `data`."""

    @abstractmethod
    def take(self, index: Int[Tensor, "n"]) -> "LinearMap":
        """The map of the samples at `index`."""

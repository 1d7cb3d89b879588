"""N flat samples of one kind of constraint."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.maps import LinearMap
from taut.outcome import Status
from taut.systems import Known


class Problem(ABC):
    """What there is to solve. Batch dimensions end at `pose`: all tensors lead with N."""

    prepared: Known
    start: Float[Tensor, "N I"] | None  # multipliers to start from
    group: int  # so many consecutive samples decide together: the paper's descent

    @property
    @abstractmethod
    def inputs(self) -> tuple[Tensor, ...]:
        """What derivatives are taken in, in order; v is the first."""

    @property
    def units(self) -> int:
        """How many multipliers a sample has."""
        return self.prepared.map.shape[0]

    @property
    @abstractmethod
    def named(self) -> Mapping[str, Tensor]:
        """The inputs by the names that users know."""

    def remark(self, verdict: Status, sample: int) -> str:
        """What else can be said of this verdict on that sample: a sentence, or nothing."""
        if verdict is not Status.NONFINITE:
            return ""
        bad = {name: int(self.unusable(name, x).sum()) for name, x in self.named.items()}
        found = [f"{n} of the {self.named[k].numel()} entries of {k}" for k, n in bad.items() if n]
        if not found:
            given = ", ".join(name for name, x in self.named.items() if x.numel())
            return f" All entries of {given} are finite; {self.derived}."
        more = " (Of reconcile: y is not a number there, or out of range.)" if bad.get("v") else ""
        return f" Not finite: {', '.join(found)}.{more}"

    @property
    def derived(self) -> str:
        """What is not finite where all that was given is."""
        return "what they give is not"

    def unusable(self, name: str, x: Tensor) -> Tensor:
        """Where x holds what is not a number. An infinite v at a finite end, of the range or of
        the bounds on z, holds its output."""
        if name != "v":
            return ~x.isfinite()
        *_, lower, upper = self.sides
        return ~(
            x.isfinite() | (x.isneginf() & lower.isfinite()) | (x.isposinf() & upper.isfinite())
        )

    @abstractmethod
    def over(self, *inputs: Tensor) -> "Problem":
        """The same kind with other tensors, and no start."""

    @abstractmethod
    def started(self, start: Tensor | None, *inputs: Tensor) -> "Problem":
        """The same kind and group with other tensors and another start."""

    @abstractmethod
    def bare(self) -> "Problem":
        """The same kind without tensors, for an autograd function to keep."""

    def copied(self) -> "Problem":
        """The same numbers in memory of their own, without a graph."""
        return self.over(*(x.detach().clone() for x in self.inputs))

    @abstractmethod
    def needed(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Those of the inputs that derivatives read."""

    @classmethod
    @abstractmethod
    def restored(cls, prepared: Known, needed: Sequence[Tensor]) -> "Problem":
        """A problem for derivatives, with what `needed` kept."""

    @abstractmethod
    def joined(
        self, inputs: Sequence[Tensor], dims: Sequence[int | None], size: int
    ) -> tuple["Problem", tuple[Tensor, ...]]:
        """A batch of `size` batches as one: the kind without tensors, and its inputs.

        vmap has mapped dimension `dims` of each input.
        """

    @abstractmethod
    def take(self, index: Int[Tensor, "n"]) -> "Problem":
        """Some of the samples."""

    @property
    def statement(self) -> str:
        """What is asked of z, for messages."""
        return "A z = b"

    @property
    @abstractmethod
    def sides(self) -> tuple[LinearMap, Tensor, Tensor, Tensor, Tensor]:
        """C, lower, upper, and the ends between which z may lie: what a proof is about."""

    def active(self, multipliers: Tensor, u: Tensor, z: Tensor) -> Int[Tensor, "N _"]:
        """1 for an inequality or a bound held at its lower side, −1 at its upper one, else 0."""
        return torch.zeros(len(z), 0, dtype=torch.int8, device=z.device)

    @abstractmethod
    def value(self, multipliers: Tensor, u: Tensor) -> Float[Tensor, "N"]:
        """D at the solution."""

    def quick_loss(self, y: Tensor, multipliers: Tensor, u: Tensor) -> Float[Tensor, "N"] | None:
        """Σψ(y) − yᵀv + D(λ) by the backend, where it can."""
        return None

    @abstractmethod
    def envelope(
        self, multipliers: Tensor, u: Tensor, z: Tensor, g: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """g times the derivatives of D in the inputs at fixed λ: all the matched loss needs."""

    @abstractmethod
    def pullback(
        self,
        multipliers: Tensor,
        u: Tensor,
        status: Tensor,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """The gradients in the inputs from those of z, λ and u; themselves differentiable."""

    @abstractmethod
    def pushforward(
        self, multipliers: Tensor, u: Tensor, status: Tensor, tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tangents of z, λ and u from those of the inputs."""

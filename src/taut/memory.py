"""The multipliers of every training sample, kept across epochs."""

import reprlib
from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.accept import as_array
from taut.autograd import check_recorded, recording
from taut.solution import Solution


@final
class LagrangeMemory:
    """The multipliers of every training sample, kept across epochs; starts at 0.

    Reading and storing go by sample index, as a shuffled `DataLoader` gives it. Stored are samples
    that converged, and undecided ones. Beside h, `layer.loss` keeps them and does not start from
    them: without their u they lead to other points. It belongs to the training set and not to the
    model, like the state of an optimiser: no module has it in its `state_dict` or moves it, and
    `DistributedDataParallel` does not send it around. It is saved by its own `state_dict`.

    >>> memory = LagrangeMemory(num_samples=100, num_constraints=2)
    >>> memory[torch.tensor([3, 1])].shape
    torch.Size([2, 2])
    >>> other = LagrangeMemory(100, 2).to(torch.float64)
    >>> other.load_state_dict(memory.state_dict())
    """

    multipliers: Float[Tensor, "samples constraints"]
    """The table: a row for each sample, or for each of those of this rank."""
    num_samples: int
    rank: int
    world_size: int

    def __init__(
        self, num_samples: int, num_constraints: int, *, rank: int = 0, world_size: int = 1
    ):
        if num_samples < 0 or num_constraints < 0:
            raise ValueError(
                f"sizes must not be negative; got {num_samples} samples, "
                f"{num_constraints} constraints."
            )
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        rows = len(range(rank, num_samples, world_size))  # sample i has row i // world_size
        self.multipliers = torch.zeros(rows, num_constraints)

    def to(self, *args: Any, **kwargs: Any) -> "LagrangeMemory":
        """Move the table to a device or a dtype, as `Tensor.to`; returns this memory."""
        self.multipliers = self.multipliers.to(*args, **kwargs)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """The table by its name, for a checkpoint. With many processes every rank must call it."""
        return {"multipliers": self._gathered() if self.world_size > 1 else self.multipliers}

    def _gathered(self) -> Tensor:
        rows, columns = -(-self.num_samples // self.world_size), self.multipliers.shape[1]
        own = self.multipliers.new_zeros(rows, columns)  # as many on each rank
        own[: len(self.multipliers)] = self.multipliers
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, own)
        return torch.stack(parts, 1).reshape(-1, columns)[: self.num_samples]

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the table of a checkpoint, in the dtype and on the device that this one has.

        With many processes each rank takes its own rows, whatever number of ranks wrote it.
        """
        if set(state_dict) != {"multipliers"}:
            raise ValueError(
                "the state_dict of a LagrangeMemory has one entry, 'multipliers'; got "
                f"{sorted(state_dict)}."
            )
        found, shape = state_dict["multipliers"], (len(self), self.multipliers.shape[1])
        if found.shape != shape:
            raise ValueError(
                f"this memory is {shape}, samples × constraints; got multipliers "
                f"{tuple(found.shape)}. A memory belongs to one training set: make "
                f"LagrangeMemory{tuple(found.shape)}, or start without the old one."
            )
        self.multipliers.copy_(found[self.rank :: self.world_size])

    def __repr__(self) -> str:
        samples, constraints = len(self), self.multipliers.shape[1]
        place = f", rank={self.rank}, world_size={self.world_size}" if self.world_size > 1 else ""
        return f"LagrangeMemory(num_samples={samples}, num_constraints={constraints}{place})"

    def __getitem__(self, index: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch I"]:
        index, table = self.rows(index), self.multipliers
        try:
            found = table.index_select(0, index if index.ndim == 1 else index.reshape(-1))
        except (IndexError, RuntimeError):
            self._check_range(index)
            raise
        return found if index.ndim == 1 else found.reshape(*index.shape, table.shape[-1])

    def __len__(self) -> int:
        return self.num_samples

    def store(self, index: Int[Tensor, "*batch"], solution: Solution) -> None:
        """Keep the multipliers of `solution` for the samples at `index`."""
        if not isinstance(solution, Solution):
            raise TypeError(
                f"store needs the Solution of the samples; got {type(solution).__name__}."
            )
        index, table = self.rows(index), self.multipliers
        if index.numel() and not torch.compiler.is_compiling():  # before anything is written
            low, high = index.aminmax()
            if low < 0 or high >= len(table):
                self._check_range(index)
        found = solution.multipliers.detach()
        if found.shape != (*index.shape, table.shape[-1]):
            raise ValueError(
                f"index {tuple(index.shape)} and multipliers {tuple(found.shape)} do not belong "
                f"together in a memory of {tuple(table.shape)}."
            )
        if index.ndim != 1:
            index, found = index.reshape(-1), found.reshape(-1, table.shape[-1])
        failed = solution._outcome.failed
        if failed or found.dtype != table.dtype:
            found = found.to(table.dtype)
            usable = found.isfinite().all(-1) & (solution.status.reshape(-1) <= 1)
            if failed < 0:  # nobody may look, as in compiled code: what is there is written again
                found = torch.where(usable.unsqueeze(-1), found, table.index_select(0, index))
            else:
                index, found = index[usable], found[usable]
        table.index_copy_(0, index, found)

    def recalled(
        self, index: Int[Tensor, "*batch"], batch: torch.Size, constraints: int
    ) -> Float[Tensor, "*batch I"]:
        """Those at `index`, for a batch of that shape of samples with so many constraints."""
        columns = self.multipliers.shape[1]
        if columns != constraints:
            raise ValueError(
                f"this memory has {columns} multipliers a sample, and the layer {constraints} "
                f"constraints: make LagrangeMemory({self.num_samples}, {constraints})."
            )
        found = self[index]
        if found.shape[:-1] != batch:
            raise ValueError(
                f"index must say of each sample of the batch which one it is, {tuple(batch)}; got "
                f"{tuple(found.shape[:-1])}."
            )
        return found

    def overwrite(self, index: Int[Tensor, "*batch"], found: Float[Tensor, "*batch I"]) -> None:
        """Put these multipliers where those at `index` were, whatever they are."""
        rows, columns = self.rows(index).reshape(-1), self.multipliers.shape[-1]
        self.multipliers.index_copy_(0, rows, found.reshape(-1, columns))

    def rows(self, index: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Where in the table these samples are."""
        if not torch.compiler.is_compiling() and recording():
            check_recorded()
        table = self.multipliers
        if not (
            isinstance(index, Tensor)
            and index.dtype is torch.long
            and index.is_cpu
            and table.is_cpu  # torch itself looks at every index
        ):
            index = _integers(index, table.device)
            if not index.is_cpu:
                self._check_range(index)
            index = index.long()
        if torch.compiler.is_compiling():  # a compiler would count negative ones from the end
            index = torch.where(index < 0, len(self), index)
        return index if self.world_size == 1 else self._own(index)

    def _own(self, index: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self._check_range(index)
            foreign = index[index % self.world_size != self.rank]
            if len(foreign):
                raise IndexError(
                    f"sample {int(foreign[0])} belongs to rank "
                    f"{int(foreign[0]) % self.world_size}, and this is rank {self.rank} of "
                    f"{self.world_size}: draw samples with taut.distributed.ShardSampler."
                )
        return index // self.world_size

    def _check_range(self, index: Tensor) -> None:
        low, high = (int(x) for x in index.aminmax()) if index.numel() else (0, -1)
        if low < 0 or high >= len(self):
            raise IndexError(
                f"sample indices must lie in 0 … {len(self) - 1}; got {low} … {high}."
            ) from None


def _integers(index: Any, device: torch.device) -> Tensor:
    try:
        index = torch.as_tensor(as_array(index), device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "Those of a slice are torch.arange(start, stop)."
        raise TypeError(
            f"index must hold integers, the numbers of the samples; got {reprlib.repr(index)}. "
            f"{hint if isinstance(index, slice) else f'Torch says: {error}'}"
        ) from None
    if not index.numel():
        return index.long()  # of [] torch makes a floating tensor
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"index must hold integers; got {index.dtype}.")
    return index

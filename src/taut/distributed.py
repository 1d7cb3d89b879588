"""Training with many processes: each sample, and its multipliers, stay on one rank.

Sample i belongs to rank i mod R. A rank keeps the multipliers of its own samples only, N/R of them;
nothing is sent around but in `LagrangeMemory.state_dict`, which gathers the whole table.
"""

from collections.abc import Iterator, Sized
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from taut.memory import LagrangeMemory


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process among all; alone where nobody has started a process group."""
    if rank is None or world_size is None:
        started = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if rank is None and started else rank or 0
        world_size = dist.get_world_size() if world_size is None and started else world_size or 1
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in 0 … {world_size - 1}; got {rank}.")
    return rank, world_size


@final
class ShardSampler(Sampler[int]):
    """The samples of this rank, in another order each epoch: i with i mod R = rank, always.

    A `DataLoader` with it meets a sample on the same rank in every epoch, where its multipliers
    are. torch's `DistributedSampler` deals them out anew each time. All ranks are equally long:
    one that has a sample less repeats one of its own.

    >>> list(ShardSampler(7, shuffle=False, rank=1, world_size=2))
    [1, 3, 5, 1]
    """

    num_samples: int
    rank: int
    world_size: int
    shuffle: bool
    seed: int
    epoch: int

    def __init__(
        self,
        data: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        self.rank, self.world_size = _place(rank, world_size)
        self.num_samples = data if isinstance(data, int) else len(data)
        if self.num_samples < self.world_size:
            raise ValueError(
                f"each of the {self.world_size} ranks needs a sample; got {self.num_samples} "
                "in all."
            )
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order: another one for each epoch, the same for the same epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_samples // self.world_size)

    def __iter__(self) -> Iterator[int]:
        own = torch.arange(self.rank, self.num_samples, self.world_size)
        if self.shuffle:
            source = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch + self.rank)
            own = own[torch.randperm(len(own), generator=source)]
        yield from torch.cat([own, own[: len(self) - len(own)]]).tolist()


def sharded_memory(
    num_samples: int,
    num_constraints: int,
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> LagrangeMemory:
    """A `LagrangeMemory` for the samples of this rank, as `ShardSampler` deals them out.

    It is read and written by the index of the sample in the whole training set. Every rank must
    call its `state_dict()`, which gathers the table of all; any number of ranks can load that.

    >>> memory = sharded_memory(7, 2, rank=1, world_size=2)
    >>> memory.multipliers.shape, memory[torch.tensor([5, 1])].shape
    (torch.Size([3, 2]), torch.Size([2, 2]))
    """
    rank, world_size = _place(rank, world_size)
    return LagrangeMemory(num_samples, num_constraints, rank=rank, world_size=world_size)


def parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel(model, **options)`, which alone refuses a model with a sparse A.

    A sparse matrix is a buffer that it cannot send around: each rank keeps its own, which must be
    the same.

    >>> parallel(nn.Linear(2, 3))  # needs torch.distributed.init_process_group(…) first
    Traceback (most recent call last):
    ValueError: Default process group has not been initialized, please make sure to call ...
    """
    sparse = [name for name, x in model.named_buffers() if x.layout is not torch.strided]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sparse)
    return DistributedDataParallel(model, **options)

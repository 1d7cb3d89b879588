"""What each process of test_distributed.py does: it trains, saves, begins again, and trains on."""

import gc
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import taut
from taut.distributed import ShardSampler, parallel, sharded_memory

N, K, EPOCHS, BATCH = 26, 5, 3, 4


class Model(torch.nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.net = torch.nn.Linear(3, K)
        A = torch.tensor([[1.0, 1, 0, 0, 1], [0, 0, 1, -1, 0]])
        A = A.to_sparse() if sparse else A
        self.layer = taut.Projection(A, activation="sigmoid")

    def forward(self, x, b, init):
        """The layer is called within `forward`, so that DDP sees the whole step."""
        return self.layer.solve(self.net(x), b, init=init)


def data():
    source = torch.Generator().manual_seed(7)
    x, y = torch.randn(N, 3, generator=source), torch.rand(N, K, generator=source)
    return x, y, Model(False).layer.A


def train(model, memory, batches, optimizer):
    """One epoch; how many samples started from nothing."""
    x, y, A = data()
    cold = 0
    for index in batches:
        init = memory[index]
        cold += int((init == 0).all(-1).sum())
        solution = model(x[index], y[index] @ A.T, init)
        optimizer.zero_grad()
        taut.matched_loss(solution, y[index]).backward()
        optimizer.step()
        memory.store(index, solution)
    return cold


def started(sparse: bool):
    torch.manual_seed(3)
    model = Model(sparse)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def epoch(rank=None, world_size=None, number=0):
    """The batches of a rank."""
    sampler = ShardSampler(N, rank=rank, world_size=world_size)
    sampler.set_epoch(number)
    return list(DataLoader(torch.arange(N), batch_size=BATCH, sampler=sampler))


def main(folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for sparse in (False, True):
        model, optimizer = started(sparse)
        # As part of the model, which DDP wraps: it must not be sent around.
        memory = model.memory = sharded_memory(N, 2)
        wrapped = parallel(model)
        cold = []
        for number in range(EPOCHS):
            cold.append(train(wrapped, memory, epoch(number=number), optimizer))
            if number == 0:
                saved = {"model": model.state_dict(), "memory": memory.state_dict()}
                saved = {k: {n: x.clone() for n, x in part.items()} for k, part in saved.items()}
        again, optimizer = started(sparse)
        again.load_state_dict(saved["model"])
        resumed = sharded_memory(N, 2)
        resumed.load_state_dict(saved["memory"])
        wrapped = parallel(again)
        for number in range(1, EPOCHS):
            train(wrapped, resumed, epoch(number=number), optimizer)
        found[sparse] = {
            "weight": model.net.weight.detach(),
            "memory": memory.state_dict()["multipliers"],
            "rows": len(memory.multipliers),
            "cold": cold,
            "resumed weight": again.net.weight.detach(),
            "resumed memory": resumed.state_dict()["multipliers"],
        }
    torch.save(found, f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()  # nobody leaves while another still asks
    del wrapped  # it holds the process group, whose threads must end before the interpreter
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

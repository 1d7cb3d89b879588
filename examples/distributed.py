"""Many processes: torchrun --nproc-per-node 2 examples/distributed.py

Each sample stays on one rank, with its multipliers, so that every solve after the first epoch
starts where the last one ended. The checkpoint of rank 0 can be loaded by any number of ranks.
"""

import argparse
import gc

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import taut
from taut.distributed import ShardSampler, parallel, sharded_memory

SAMPLES, INPUTS, OUTPUTS = 2000, 8, 10


class Model(torch.nn.Module):
    """A network whose outputs, shares of two groups, sum to the totals of their groups."""

    def __init__(self):
        super().__init__()
        hidden = 64
        self.net = torch.nn.Sequential(
            torch.nn.Linear(INPUTS, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, OUTPUTS)
        )
        groups = torch.eye(2).repeat_interleave(OUTPUTS // 2, 1)
        self.layer = taut.Projection(groups, activation="exp")

    def forward(self, x, b, init):
        return self.layer.solve(self.net(x), b, init=init)


def training_set() -> TensorDataset:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, INPUTS, generator=source)
    y = (x @ torch.randn(INPUTS, OUTPUTS, generator=source) / 3).exp()
    return TensorDataset(torch.arange(SAMPLES), x, y)


def main(epochs: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, model = training_set(), Model()
    sampler = ShardSampler(data)
    loader = DataLoader(data, batch_size=100, sampler=sampler)
    memory = sharded_memory(SAMPLES, num_constraints=2)
    network = parallel(model)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(3)  # loss, iterations, samples
        for index, x, y in loader:
            solution = network(x, y @ model.layer.A.T, memory[index])
            loss = taut.matched_loss(solution, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            memory.store(index, solution)
            n = len(index)
            total += torch.tensor([n * loss.item(), float(solution.iterations.sum()), n])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mean, iterations = (total[:2] / total[2]).tolist()
            print(f"epoch {epoch}: loss {mean:.4f}, {iterations:.1f} iterations a sample")
    checkpoint = {"model": model.state_dict(), "memory": memory.state_dict()}  # on every rank
    if dist.get_rank() == 0:
        table = tuple(checkpoint["memory"]["multipliers"].shape)
        print(f"each rank keeps {len(memory.multipliers)} rows; the checkpoint has {table}")
    dist.barrier()  # nobody leaves while another still asks
    # What holds on to the process group goes first: its threads must end before the interpreter.
    del network, solution, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)

"""The tax on training: one optimiser step with a constrained output over the same step without.

`Projection.loss` with a memory against plain sigmoid + BCE, float32, run in turns in one
process. The median ratio of the turns is reported: of the time that passed, or with `--threads 1`
of the processor's time, which other work on the machine disturbs less.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import taut

# outputs, constraints, hidden units, wanted ratio
SIZES = [(64, 8, 256, 1.15), (100, 50, 256, 1.45), (64, 8, 1024, 1.07)]
SAMPLES, BATCH, INPUTS = 8192, 256, 32


def network(hidden, outputs):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(INPUTS, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )
    return net, torch.optim.Adam(net.parameters(), lr=1e-3)


class Task:
    """Two networks on the same data: `step(constrained, index)` trains one of them once."""

    def __init__(self, outputs, constraints, hidden, teacher=1.0):
        torch.manual_seed(1)
        self.x = torch.randn(SAMPLES, INPUTS)
        logits = self.x @ torch.randn(INPUTS, outputs) * 0.3
        self.y = torch.sigmoid(teacher * logits + 0.3 * torch.randn(SAMPLES, outputs))
        A = torch.randn(constraints, outputs)
        self.b = self.y @ A.T
        self.layer = taut.Projection(A, activation="sigmoid")
        self.memory = taut.LagrangeMemory(SAMPLES, constraints)
        self.networks = {kind: network(hidden, outputs) for kind in (False, True)}

    def step(self, constrained, index):
        net, optimizer = self.networks[constrained]
        v = net(self.x[index])
        if constrained:
            given = {"memory": self.memory, "index": index}
            loss = self.layer.loss(v, self.y[index], self.b[index], **given)
        else:
            loss = binary_cross_entropy_with_logits(v, self.y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def iterations(self, index):
        """How many a sample takes on average, from the memory."""
        with torch.no_grad():
            v = self.networks[True][0](self.x[index])
        solution = self.layer.solve(v, self.b[index], init=self.memory[index])
        return solution.iterations.double().mean().item()


def measure(size, epochs, teacher):
    outputs, constraints, hidden, wanted = size
    task, ratios, seconds = Task(outputs, constraints, hidden, teacher), [], {False: [], True: []}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for epoch in range(epochs + 2):  # the first two warm up: the memory starts empty
        for index in torch.randperm(SAMPLES).split(BATCH):
            times = {}
            for constrained in (False, True):
                start = clock()
                task.step(constrained, index)
                times[constrained] = clock() - start
            if epoch >= 2:
                ratios.append(times[True] / times[False])
                for kind, value in times.items():
                    seconds[kind].append(value)
    return {
        "outputs": outputs,
        "constraints": constraints,
        "hidden": hidden,
        "ratio": statistics.median(ratios),
        "wanted": wanted,
        "plain_ms": 1e3 * statistics.median(seconds[False]),
        "constrained_ms": 1e3 * statistics.median(seconds[True]),
        "iterations": task.iterations(torch.arange(BATCH)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--teacher", type=float, default=1.0, help="times the teacher's logits")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/tax.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    print(
        f"{'K':>4} {'I':>3} {'hidden':>6} {'plain ms':>9} {'taut ms':>8} {'ratio':>6} {'wanted':>6}"
    )
    for size in SIZES:
        row = measure(size, options.epochs, options.teacher)
        rows.append(row)
        print(
            f"{row['outputs']:>4} {row['constraints']:>3} {row['hidden']:>6} "
            f"{row['plain_ms']:9.2f} {row['constrained_ms']:8.2f} {row['ratio']:6.2f} "
            f"{row['wanted']:6.2f}",
            flush=True,
        )
    options.out.parent.mkdir(exist_ok=True)
    settings = {"threads": options.threads, "epochs": options.epochs, "torch": torch.__version__}
    options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

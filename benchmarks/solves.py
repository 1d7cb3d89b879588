"""What the compiled solve alone takes on two checkouts, in one run: cold, warm, and in training.

    python benchmarks/solves.py OLD [NEW]

As checkouts.py, but the time is that of one thread within the compiled code. Warm is from the λ of
logits that were 1 % or 10 % different, in float64. Training is in float32: batches as a network
brings them, from λ of the epoch before, for a mild teacher and one four times as steep.
"""

import sys
import time

from checkouts import answer, compare

SIZES = [(K, I, N) for K, I in ((10, 4), (64, 8), (100, 50)) for N in (1, 256)]
ALONE, TOGETHER = ("cold", "warm 1 %", "warm 10 %"), ("training", "training, steep")
SAMPLES, INPUTS, EPOCHS = 2048, 32, 6


class Clock:
    """Seconds within the compiled code so far."""

    def __init__(self) -> None:
        from taut.backends import cpu

        self._run, self._seconds = cpu.run, 0.0
        cpu.run = self._timed

    def _timed(self, *args):
        start = time.thread_time()
        left = self._run(*args)
        self._seconds += time.thread_time() - start
        return left

    def __call__(self) -> float:
        return self._seconds


def _solves(K: int, I: int, N: int) -> dict:
    import torch

    import taut

    torch.manual_seed(0)
    A, v = torch.randn(I, K).double(), 2 * torch.randn(N, K).double()
    b = torch.sigmoid(torch.randn(N, K).double()) @ A.T
    layer = taut.Projection(A, activation="sigmoid")
    start = layer.solve(v, b).multipliers
    calls = {"cold": lambda: layer.solve(v, b)}
    for part in (1, 10):
        moved = v + part / 100 * 2 * torch.randn(N, K).double()
        calls[f"warm {part} %"] = lambda moved=moved: layer.solve(moved, b, init=start)
    for name, teacher in zip(TOGETHER, (1.0, 4.0), strict=True) if N > 1 else ():
        calls[name] = _recorded(K, I, N, teacher)
    return calls


def _recorded(K: int, I: int, N: int, teacher: float):
    """The solves of the last four steps of a training."""
    import torch
    from torch import nn

    import taut

    layers = (nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, K))
    network, x = nn.Sequential(*layers), torch.randn(SAMPLES, INPUTS)
    noise = 0.3 * torch.randn(SAMPLES, K)
    y = torch.sigmoid(teacher * (x @ torch.randn(INPUTS, K) * 0.3) + noise)
    A = torch.randn(I, K)
    b, memory = y @ A.T, taut.LagrangeMemory(SAMPLES, I)
    layer = taut.Projection(A, activation="sigmoid")
    optimizer, steps = torch.optim.Adam(network.parameters(), lr=1e-3), []
    for _ in range(EPOCHS):
        for index in torch.randperm(SAMPLES).split(N):
            v = network(x[index])
            steps.append((v.detach(), b[index], memory[index].clone()))
            loss = layer.loss(v, y[index], b[index], memory=memory, index=index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def solve() -> None:
        for v, b, start in steps[-4:]:
            layer.solve(v, b, init=start)

    return solve


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        answer(_solves, Clock())
    else:
        names = {N: ALONE + TOGETHER if N > 1 else ALONE for *_, N in SIZES}
        compare(__file__, [(size, call) for size in SIZES for call in names[size[-1]]])

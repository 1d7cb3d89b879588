"""A training step and an inference call under torch.compile over the same in eager mode.

    python benchmarks/compiled.py

Three training steps are timed, each in eager mode and compiled, all in turns and with one thread:
that of the network alone (binary cross-entropy), the three calls `solve`, `matched_loss` and
`store`, and `Projection.loss`. What a compiler costs around any network is in the first; `taut` is
the rest, "beyond plain". Times are the shortest, of the processor: other work does not count.
"""

import sys
import time
import warnings
from collections.abc import Callable

import torch

import taut

SIZES = [(10, 4), (64, 8), (100, 50)]
BATCHES = [64, 256, 1024]
KINDS = {
    "equations": lambda K: {},
    "bounds": lambda K: {"lower": 0.05, "upper": 0.95},
    "rows": lambda K: {"G": torch.randn(4, K), "upper": 0.3 * K**0.5},
}


def steps(layer: taut.Projection, net: torch.nn.Module, memory: taut.LagrangeMemory):
    def plain(x, y, b, index):
        return torch.nn.functional.binary_cross_entropy_with_logits(net(x), y)

    def three(x, y, b, index):
        solution = layer.solve(net(x), b, init=memory[index])
        memory.store(index, solution)
        return taut.matched_loss(solution, y)

    def loss(x, y, b, index):
        return layer.loss(net(x), y, b, memory=memory, index=index)

    return plain, three, loss


def calls(layer: taut.Projection, net: torch.nn.Module, memory: taut.LagrangeMemory):
    def plain(x, y, b, index):
        return net(x).sigmoid()

    def forward(x, y, b, index):
        return layer(net(x), b)

    return plain, forward


def shortest(functions: list[Callable], args: tuple, train: bool, seconds: float) -> list[float]:
    """Of each function, in µs, called in turns of a few."""
    best, end = [float("inf")] * len(functions), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate(functions):
            for _ in range(5):
                start = time.thread_time()
                with torch.set_grad_enabled(train):
                    found = function(*args)
                    if train:
                        found.backward()
                best[i] = min(best[i], 1e6 * (time.thread_time() - start))
    return best


def main(kinds: list[str], seconds: float = 3.0) -> None:
    warnings.filterwarnings("ignore", category=taut.FailureWarning)
    torch.set_num_threads(1)
    columns = ("eager µs", "compiled", "ratio", "beyond plain: eager", "compiled")
    print(" " * 44, *(f"{x:>{max(9, len(x))}s}" for x in columns))
    for kind in kinds:
        for K, I in SIZES:
            for n in BATCHES:
                torch.manual_seed(0)
                A, y, x = torch.randn(I, K), torch.rand(n, K), torch.randn(n, 32)
                options = {"activation": "sigmoid", "on_failure": "return"}
                layer = taut.Projection(A, **KINDS[kind](K), **options)
                net = torch.nn.Sequential(
                    torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, K)
                )
                rows = I + (0 if layer.G is None else len(layer.G))
                memory = taut.LagrangeMemory(n, rows)
                args = (x, y, y @ A.T, torch.randperm(n))
                for make, train in ((steps, True), (calls, False)):
                    torch.compiler.reset()
                    own = make(layer, net, memory)
                    both = [*own, *(torch.compile(f, fullgraph=True) for f in own)]
                    shortest(both, args, train, 0.2)
                    times = shortest(both, args, train, seconds)
                    eager, compiled = times[: len(own)], times[len(own) :]
                    for f, e, c in zip(own, eager, compiled, strict=True):
                        name = f"{kind} ({K}, {I}) N = {n} {make.__name__}: {f.__name__}"
                        beyond = f"{e - eager[0]:20.0f}{c - compiled[0]:10.0f}"
                        print(f"{name:44s}{e:10.0f}{c:10.0f}{c / e:10.2f}{beyond}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))

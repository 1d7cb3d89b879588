"""A training step and an inference call under torch.compile over the same in eager mode.

    python benchmarks/compiled.py

Both are timed in turns, one thread; the ratio is of the shortest times.
"""

import time
import warnings

import torch

import taut

SIZES = [(10, 4), (64, 8), (100, 50)]
BATCHES = [64, 256, 1024]
KINDS = {
    "equations": lambda K: {},
    "bounds": lambda K: {"lower": 0.05, "upper": 0.95},
    "rows": lambda K: {"G": torch.randn(4, K), "upper": 0.3 * K**0.5},
}


def training(layer: taut.Projection, net: torch.nn.Module, memory: taut.LagrangeMemory):
    def step(x, y, b, index):
        solution = layer.solve(net(x), b, init=memory[index])
        memory.store(index, solution)
        return taut.matched_loss(solution, y)

    return step


def inference(layer: taut.Projection, net: torch.nn.Module, memory: taut.LagrangeMemory):
    def call(x, y, b, index):
        return layer(net(x), b)

    return call


def shortest(functions, args, train: bool, seconds: float) -> list[float]:
    """Of each function, called in turns."""
    best, end = [float("inf")] * len(functions), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            with torch.set_grad_enabled(train):
                found = function(*args)
                if train:
                    found.backward()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def main(seconds: float = 1.5) -> None:
    warnings.filterwarnings("ignore", category=taut.FailureWarning)
    torch.set_num_threads(1)
    print(f"{'':34s}{'eager ms':>10s}{'compiled':>10s}{'ratio':>8s}")
    for kind, sides in KINDS.items():
        for K, I in SIZES:
            for n in BATCHES:
                torch.manual_seed(0)
                A, y, x = torch.randn(I, K), torch.rand(n, K), torch.randn(n, 32)
                options = {"activation": "sigmoid", "on_failure": "return"}
                layer = taut.Projection(A, **sides(K), **options)
                net = torch.nn.Sequential(
                    torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, K)
                )
                columns = I + (0 if layer.G is None else len(layer.G))
                memory = taut.LagrangeMemory(n, columns)
                args = (x, y, y @ A.T, torch.randperm(n))
                for make in (training, inference):
                    torch.compiler.reset()
                    function = make(layer, net, memory)
                    pair = [function, torch.compile(function, fullgraph=True)]
                    train = make is training
                    shortest(pair, args, train, 0.1)
                    eager, compiled = shortest(pair, args, train, seconds)
                    name = f"{kind} {make.__name__} ({K}, {I}), N = {n}"
                    print(f"{name:34s}{1e3 * eager:10.3f}{1e3 * compiled:10.3f}", end="")
                    print(f"{compiled / eager:8.2f}", flush=True)


if __name__ == "__main__":
    main()

"""The same calls on two checkouts, in one run: is anything slower than before?

    python benchmarks/checkouts.py OLD [NEW]

OLD and NEW are folders of checkouts whose kernel is built in place (`python setup.py build_ext
--inplace`); NEW is this one unless given. A worker of each answers in turn, so that other work on
the machine hits both alike. Shown are the shortest times, in microseconds, and new / old.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SIZES = [(K, I, N) for K, I in ((10, 4), (64, 8), (100, 50)) for N in (1, 16, 256, 2000)]
CALLS = ("forward", "with gradient", "forward + backward", "training step")
ROUNDS, SECONDS = 5, 0.15


def compare(script: str, asked: list[tuple[tuple[int, int, int], str]]) -> None:
    """Ask the workers of OLD and NEW, which `script` starts, in turn."""
    here = Path(__file__).parents[1]
    folders = [Path(folder) for folder in (*sys.argv[1:], here)[:2]]
    for folder in folders:
        if not list(folder.glob("src/taut/_kernel*")):
            raise SystemExit(
                f"{folder} has no kernel in src/taut: run python setup.py build_ext --inplace in "
                "it, and where that leaves the library in build/, copy it from there."
            )
    workers = [_start(script, folder) for folder in folders]
    print(f"{'K, I, N':>14}  {'call':<20} {'old µs':>9} {'new µs':>9} {'new / old':>9}")
    try:
        for size, call in asked:
            times = [[_ask(worker, size, call) for worker in workers] for _ in range(ROUNDS)]
            before, after = (min(column) for column in zip(*times, strict=True))
            label, ratio = ", ".join(map(str, size)), after / before
            print(f"{label:>14}  {call:<20} {before:9.1f} {after:9.1f} {ratio:9.2f}", flush=True)
    except KeyboardInterrupt:
        print("Stopped.")
    finally:
        for worker in workers:
            worker.kill()


def _start(script: str, folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, script, "--worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _ask(worker: subprocess.Popen, size: tuple[int, int, int], call: str) -> float:
    assert worker.stdin and worker.stdout
    worker.stdin.write(json.dumps([size, call]) + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def answer(make: Callable[[int, int, int], dict], clock: Callable[[], float]) -> None:
    """Answer questions from standard input: the shortest time of a call, in microseconds."""
    import torch

    torch.set_num_threads(1)
    problems: dict = {}
    for line in sys.stdin:
        (K, I, N), call = json.loads(line)
        calls = problems.setdefault((K, I, N), None) or make(K, I, N)
        problems[K, I, N] = calls
        function, best, end = calls[call], float("inf"), time.perf_counter() + SECONDS
        function()
        while best == float("inf") or time.perf_counter() < end:
            start = clock()
            function()
            best = min(best, clock() - start)
        print(1e6 * best, flush=True)


def _calls(K: int, I: int, N: int) -> dict:
    import torch

    import taut

    torch.manual_seed(0)
    A, y, v = torch.randn(I, K), torch.sigmoid(torch.randn(N, K)), torch.randn(N, K)
    b, index, leaf = y @ A.T, torch.arange(N), v.clone().requires_grad_()
    layer, memory = taut.Projection(A, activation="sigmoid"), taut.LagrangeMemory(N, I)

    def backward() -> None:
        torch.autograd.grad(layer.solve(leaf, b).z.sum(), leaf)

    def step() -> None:
        solution = layer.solve(leaf, b, init=memory[index])
        torch.autograd.grad(taut.matched_loss(solution, y), leaf)
        memory.store(index, solution)

    forward, attached = (lambda: layer.solve(v, b)), (lambda: layer.solve(leaf, b))
    return dict(zip(CALLS, (forward, attached, backward, step), strict=True))


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        answer(_calls, time.perf_counter)
    else:
        compare(__file__, [(size, call) for size in SIZES for call in CALLS])

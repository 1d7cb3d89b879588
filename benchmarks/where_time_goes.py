"""Where the time of one call goes, and how far it is from the floor.

    .venv/bin/python benchmarks/where_time_goes.py

The floor is what no method of this kind can avoid: evaluating σ and σ', and the products Aᵀλ, A z
and A diag(w) Aᵀ, at the number of iterations a sample needs on average; nothing else.

The shares are of one thread, from a copy of the kernel compiled with a clock in it (needs gcc).
"""

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from pathlib import Path

import torch

import taut
from growth import best
from taut import activations
from taut.backends import cpu
from taut.maps import DenseMap

SIZES = [(10, 4), (64, 8), (100, 50)]
PARTS = ("activation", "products", "Hessian", "factorisation", "line search")
SOURCES = Path(cpu.__file__).parent / "csrc"


class Clock:
    """A kernel that says how long its parts took, in place of the one installed."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "profiled.so"
        flags = "-O3 -std=gnu11 -Wno-psabi -fPIC -shared -DTAUT_PROFILE".split()
        files = [str(file) for file in sorted(SOURCES.glob("*.c"))]
        subprocess.run(["gcc", *flags, *files, "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
        self.ticks = (ctypes.c_uint64 * (len(PARTS) + 1)).in_dll(library, "taut_ticks")
        function = getattr(library, f"taut_solve_{cpu.variant()}")
        pointer = ctypes.cast(function, ctypes.c_void_p)
        cpu._functions["solve"] = function, pointer

    def shares(self, call, repeats: int) -> dict[str, float]:
        """Of the time of `call`: each part of the kernel, what else it does, and all around it."""
        original, inside = cpu.run, 0.0

        def run(*args):
            nonlocal inside
            start = time.perf_counter()
            left = original(*args)
            inside += time.perf_counter() - start
            return left

        cpu.run = run
        ctypes.memset(self.ticks, 0, ctypes.sizeof(self.ticks))
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        whole = time.perf_counter() - start
        cpu.run = original
        *parts, every = (count / self.ticks[len(PARTS)] * inside / whole for count in self.ticks)
        found = dict(zip(PARTS, parts, strict=True))
        return found | {"other C": every - sum(parts), "Python": 1 - every}


def floor(v: torch.Tensor, A: torch.Tensor, iterations: float) -> float:
    """Seconds of the unavoidable operations, at their best."""
    row, A = activations.sigmoid, DenseMap(A)
    multipliers, w = torch.zeros(len(v), A.shape[0], dtype=v.dtype), row.slope(v)
    each = (
        lambda: row.sigma(v),
        lambda: row.slope(v),
        lambda: A.adjoint(multipliers),
        lambda: A.apply(v),
        lambda: A.gram(w),
    )
    return iterations * sum(best(function, 0.2) for function in each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/time.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = []
    problems = []
    for K, I in SIZES:
        torch.manual_seed(0)
        A = torch.randn(I, K, dtype=torch.float64)
        v = 2 * torch.randn(options.samples, K, dtype=torch.float64)
        b = torch.sigmoid(torch.randn(options.samples, K, dtype=torch.float64)) @ A.T
        solution = taut.project(v, A, b, activation="sigmoid")
        needed = solution.iterations.double().mean().item()
        layer = taut.Projection(A, activation="sigmoid")
        total = best(lambda layer=layer, v=v, b=b: layer.solve(v, b))
        problems.append((K, I, v, A, b, needed, total, floor(v, A, needed)))
    torch.set_num_threads(1)
    names = (*PARTS, "other C", "Python")
    print(f"{'K×I':>8} {'ms':>7} {'floor':>7} {'ratio':>6} {'its':>5}  " + "  ".join(names))
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(folder)
        for K, I, v, A, b, needed, total, least in problems:
            layer = taut.Projection(A, activation="sigmoid")
            layer.solve(v, b)
            shares = clock.shares(lambda layer=layer, v=v, b=b: layer.solve(v, b), options.repeats)
            records.append(
                {
                    "outputs": K,
                    "constraints": I,
                    "samples": options.samples,
                    "ms": 1e3 * total,
                    "floor_ms": 1e3 * least,
                    "iterations": needed,
                    "shares": shares,
                }
            )
            text = "  ".join(f"{share:>{len(part)}.0%}" for part, share in shares.items())
            print(
                f"{K:>4}×{I:<3} {1e3 * total:7.2f} {1e3 * least:7.2f} {total / least:6.1f} "
                f"{needed:5.1f}  {text}",
                flush=True,
            )
    options.out.parent.mkdir(exist_ok=True)
    settings = {"threads": options.threads, "torch": torch.__version__}
    options.out.write_text(json.dumps({**settings, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()

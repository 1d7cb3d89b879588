"""Where the time of one call goes, and how far it is from the floor.

    .venv/bin/python benchmarks/where_time_goes.py

The floor is what no method of this kind can avoid: evaluating σ and σ', and the products Aᵀλ, A z
and A diag(w) Aᵀ, at the number of iterations a sample needs on average; nothing else.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import taut
from growth import best
from taut import activations, factor, linear, step

SIZES = [(10, 4), (64, 8), (100, 50)]
PARTS = ("activation", "products", "Hessian", "factorisation", "line search", "the rest")


# Parts that keep what runs inside them; the others give it to the part it is.
WHOLE = ("Hessian", "line search")


class Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.running: list[str] = []
        self.inside = 0.0  # of parts within the one that runs

    def timed(self, part: str, function: Callable) -> Callable:
        def run(*args, **kwargs):
            if self.running and self.running[-1] in WHOLE:
                return function(*args, **kwargs)
            outer, self.inside = self.inside, 0.0
            self.running.append(part)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.running.pop()
                self.seconds[part] += spent - self.inside
                self.inside = outer + spent

        return run

    def watch(self) -> None:
        """Put the clock into the library, for this process."""
        linear._multiply = self.timed("products", linear._multiply)
        linear.DenseMap.gram = self.timed("Hessian", linear.DenseMap.gram)
        step.factorise = self.timed("factorisation", factor.factorise)
        factor.Factor.solve = self.timed("factorisation", factor.Factor.solve)
        step.solve_gram_roughly = self.timed("factorisation", factor.solve_gram_roughly)
        step._search = self.timed("line search", step._search)


def floor(v: torch.Tensor, A: torch.Tensor, iterations: float) -> float:
    """Seconds of the unavoidable operations, at their best."""
    row, A = activations.sigmoid, linear.DenseMap(A)
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
    parser.add_argument("--rows", type=int, default=256)
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
        v = 2 * torch.randn(options.rows, K, dtype=torch.float64)
        b = torch.sigmoid(torch.randn(options.rows, K, dtype=torch.float64)) @ A.T
        solution = taut.project(v, A, b, activation="sigmoid")
        needed = solution.iterations.double().mean().item()
        layer = taut.Projection(A, activation="sigmoid")
        total = best(lambda layer=layer, v=v, b=b: layer.solve(v, b))
        problems.append((K, I, v, A, b, needed, total, floor(v, A, needed)))
    clock = Clock()
    clock.watch()
    row = activations.sigmoid
    watched = replace(
        row,
        sigma=clock.timed("activation", row.sigma),
        slope=clock.timed("activation", row.slope),
    )
    print(f"{'K×I':>8} {'ms':>7} {'floor':>7} {'ratio':>6} {'its':>5}  " + "  ".join(PARTS))
    for K, I, v, A, b, needed, total, least in problems:
        layer = taut.Projection(A, activation=watched)
        layer.solve(v, b)
        clock.seconds.clear()
        start = time.perf_counter()
        for _ in range(options.repeats):
            layer.solve(v, b)
        whole = time.perf_counter() - start
        shares = {part: clock.seconds[part] / whole for part in PARTS[:-1]}
        shares["the rest"] = 1 - sum(shares.values())
        records.append(
            {
                "outputs": K,
                "constraints": I,
                "rows": options.rows,
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

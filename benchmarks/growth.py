"""Time against N, K and I, and the largest sparse problems, drawn on log axes."""

import argparse
import json
import resource
import time
from pathlib import Path

import torch

import taut


def best(function, seconds=0.5, least=3):
    """The shortest of repeated runs, for about that many seconds."""
    function()
    times, start = [], time.perf_counter()
    while len(times) < least or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def dense(N, K, I):
    """Milliseconds of one call on a random sigmoid problem in float64."""
    torch.manual_seed(0)
    v, A = 2 * torch.randn(N, K), torch.randn(I, K)
    layer = taut.Projection(A, activation="sigmoid")
    b = torch.sigmoid(torch.randn(N, K)) @ A.T
    layer.solve(v, b)
    return 1e3 * best(lambda: layer.solve(v, b))


def sparse(indices, values, shape):
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()


def margins(n):
    """n×n tables with all row and column sums 1, cost drawn at random, temperature 0.1."""
    cell = torch.arange(n * n)
    indices = torch.stack([torch.cat([cell // n, n + cell % n]), cell.repeat(2)])
    A = sparse(indices, torch.ones(2 * n * n), (2 * n, n * n))
    return -torch.rand(n * n) / 0.1, A, torch.ones(2 * n), "exp"


def hierarchy(K, I):
    """K outputs, each in one of I groups and in a second weighted one."""
    first = torch.cat([torch.arange(I), torch.randint(0, I, (K - I,))])
    rows = torch.cat([first, torch.randint(0, I, (K,))])
    values = torch.cat([torch.ones(K), torch.randn(K)])
    A = sparse(torch.stack([rows, torch.arange(K).repeat(2)]), values, (I, K))
    return torch.randn(K), A, A @ torch.sigmoid(torch.randn(K)), "sigmoid"


def large(name, problem):
    v, A, b, activation = problem
    start = time.perf_counter()
    solution = taut.project(v, A, b, activation=activation)
    seconds = time.perf_counter() - start
    residual = (A @ solution.z - b).abs().max().item()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row = {
        "problem": name,
        "K": A.shape[1],
        "I": A.shape[0],
        "nonzeros": A._nnz(),
        "seconds": seconds,
        "iterations": int(solution.iterations),
        "residual": residual,
        "peak_GiB_of_process": memory,
    }
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    return row


def sweep():
    base = {"N": 256, "K": 64, "I": 8}
    ranges = {
        "N": [16, 64, 256, 1024, 4096, 16384],
        "K": [16, 64, 256, 1024, 4096],
        "I": [1, 2, 4, 8, 16, 32, 48],
    }
    result = {}
    for name, values in ranges.items():
        result[name] = []
        for value in values:
            size = base | {name: value}
            milliseconds = dense(**size)
            result[name].append({**size, "ms": milliseconds})
            print(f"{name} = {value}: {milliseconds:.2f} ms", flush=True)
    return result


def draw(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained", sharey=True)
    for axis, (name, rows) in zip(axes, curves.items(), strict=True):
        x, y = [row[name] for row in rows], [row["ms"] for row in rows]
        axis.loglog(x, y, "o-", color="tab:blue", label="taut.project")
        slope = [y[-1] * value / x[-1] for value in x]
        axis.loglog(x, slope, ":", color="gray", label="proportional")
        fixed = ", ".join(f"{k} = {v}" for k, v in rows[0].items() if k not in (name, "ms"))
        axis.set(xlabel=name, title=f"{fixed}, sigmoid, float64")
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("milliseconds for one call")
    axes[0].legend()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    options.out.mkdir(exist_ok=True)
    curves = sweep()
    torch.manual_seed(0)
    rows = [
        large("margins 64×64", margins(64)),
        large("margins 512×512", margins(512)),
        large("hierarchy", hierarchy(1_000_000, 10_000)),
    ]
    text = json.dumps({"threads": options.threads, "sweep": curves, "sparse": rows}, indent=1)
    (options.out / "growth.json").write_text(text + "\n")
    draw(curves, options.out / "growth.png")


if __name__ == "__main__":
    main()

"""Inequalities cost microseconds a sample in the kernel: every variant, forced, beside torch.

    .venv/bin/python benchmarks/inequalities.py                       # two or three minutes
    .venv/bin/python benchmarks/inequalities.py --samples 16 --rounds 10

Each variant is a process of its own, as `TAUT_KERNEL` is read at import; all are asked in turn,
round after round, and the shortest CPU time counts. One thread, float64, through
`taut.Projection`. "warm" starts from the multipliers of a v that was 3 % off. "violation" is the
largest over |side| + |C||z|. The Euclidean problems are those of DC3: z nearest to v with
A z = b and G z ≤ h.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

VARIANTS = ("0", "v2", "v3", "v4")
#: By name: activation, outputs, equations, rows of G, what becomes of them.
CASES = {
    "linear": ("linear", 100, 50, 50, "plain"),
    "linear, rows twice": ("linear", 100, 50, 50, "twice"),
    "linear, no interior": ("linear", 100, 50, 50, "opposite"),
    "linear, 0 ≤ z ≤ 1": ("linear", 100, 10, 0, "bounds"),
    "exp, small": ("exp", 64, 8, 16, "plain"),
    "sigmoid, small": ("sigmoid", 64, 8, 16, "plain"),
    "exp": ("exp", 100, 50, 50, "plain"),
    "sigmoid": ("sigmoid", 100, 50, 50, "plain"),
}
PARTS = ("forward", "warm", "backward")


def problem(name: str, n: int) -> dict[str, Any]:
    """A layer, and what it is called with: all that `Projection.solve` takes."""
    import torch

    import taut

    kind, K, I, M, structure = CASES[name]
    torch.manual_seed(0)
    draw: dict[str, Any] = {"dtype": torch.float64}
    activation = taut.activations.resolve(kind)
    A, G = torch.randn(I, K, **draw), torch.randn(M, K, **draw)
    y, v = activation.sigma(torch.randn(n, K, **draw)), 3 * torch.randn(n, K, **draw)
    if structure == "bounds":
        y = torch.rand(n, K, **draw)
        layer = taut.Projection(A, lower=0.0, upper=1.0, activation=activation)
        return {"layer": layer, "v": v, "b": y @ A.mT, "sides": {}}
    if kind == "linear":
        b = 2 * torch.rand(n, I, **draw) - 1
        h = (G @ torch.linalg.pinv(A)).abs().sum(-1).expand(n, M)
        y = b @ torch.linalg.pinv(A).mT  # feasible, as |b| ≤ 1
    else:
        A[0] = 1  # a bounded set under exp
        b, v = y @ A.mT, v * 2 / 3
        h = y @ G.mT + 0.3 * torch.rand(n, M, **draw) * G.norm(dim=-1) * y.std()
    half = M // 2
    if structure == "twice":
        G, h = torch.cat([G[:half], G[:half]]), torch.cat([h[:, :half], h[:, :half]], -1)
    if structure == "opposite":  # the first row of each pair at what y gives: no room is left
        at = y @ G[:half].mT
        h = torch.cat([torch.where(torch.arange(half) < 5, at, h[:, :half]), -at + 1], -1)
        h[:, half : half + 5] = -at[:, :5]
        G = torch.cat([G[:half], -G[:half]])
    layer = taut.Projection(A, G=G, activation=activation)
    return {"layer": layer, "v": v, "b": b, "sides": {"upper": h}}


def violation(case: dict[str, Any], z: Any) -> float:
    """The largest over |side| + |C||z|."""
    import torch

    layer, b = case["layer"], case["b"]
    sides = [(layer.A, b, b)]
    if layer.G is not None:
        sides.append((layer.G, -torch.inf, case["sides"]["upper"]))
    worst = 0.0
    for C, low, high in sides:
        r, terms = z @ C.mT, z.abs() @ C.abs().mT
        off = torch.maximum(low - r, r - high).clamp_min(0)
        worst = max(worst, (off / (high.abs() + terms)).max().item())
    if layer.G is None:
        worst = max(worst, (-z).max().item(), (z - 1).max().item())
    return worst


def answer(question: dict[str, Any], cases: dict[Any, Any]) -> dict[str, float]:
    """CPU time of each part, in µs a sample: the shortest within `seconds`."""
    import torch

    torch.set_num_threads(1)
    n, name = question["samples"], question["case"]
    if (name, n) not in cases:
        cases[name, n] = made = problem(name, n)
        layer, v, b, sides = (made[x] for x in ("layer", "v", "b", "sides"))
        near = layer.solve(v + 0.03 * torch.randn_like(v), b, **sides)
        live = v.clone().requires_grad_()
        found = layer.solve(live, b, **sides)
        g = torch.randn_like(v)
        made["parts"] = {
            "forward": lambda: layer.solve(v, b, **sides),
            "warm": lambda: layer.solve(v, b, near, **sides),
            "backward": lambda: torch.autograd.grad(found.z, live, g, retain_graph=True),
        }
        made["violation"] = violation(made, found.z.detach())
    made = cases[name, n]
    times = {part: 1e6 / n * _best(made["parts"][part], question["seconds"]) for part in PARTS}
    return times | {"violation": made["violation"]}


def _best(call: Callable[[], object], seconds: float) -> float:
    best, end, count = float("inf"), time.perf_counter() + seconds, 0
    while count < 2 or time.perf_counter() < end:
        start = time.process_time()
        call()
        best, count = min(best, time.process_time() - start), count + 1
    return best


def work() -> None:
    """Answer each line of the input; "missing" says why the variant cannot run here."""
    try:
        import taut  # noqa: F401
    except ImportError as error:
        for _ in sys.stdin:
            print(json.dumps({"missing": str(error)}), flush=True)
        return
    cases: dict[Any, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answer(question, cases) if question else {}), flush=True)


def started(variant: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TAUT_KERNEL": variant, "OMP_NUM_THREADS": "1"},
    )


def ask(process: subprocess.Popen, question: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin and process.stdout
    print(json.dumps(question), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a worker ended.")
    return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each part in each round")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    workers = {variant: started(variant) for variant in VARIANTS}
    try:
        for variant in VARIANTS:
            if "missing" in ask(workers[variant], {}):
                workers.pop(variant).kill()
        print(f"{'case':20} variant  forward     warm backward  µs a sample; violation")
        for case in CASES:
            question = {"case": case, "samples": options.samples, "seconds": options.seconds}
            found: dict[str, dict[str, float]] = {}
            for _ in range(options.rounds):
                for variant, worker in workers.items():
                    one = ask(worker, question)
                    best = found.setdefault(variant, one)
                    found[variant] = {name: min(x, one[name]) for name, x in best.items()}
            for variant, one in found.items():
                times = " ".join(f"{one[part]:8.1f}" for part in PARTS)
                name = "torch" if variant == "0" else variant
                print(f"{case:20} {name:7} {times}  {one['violation']:.0e}", flush=True)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    main()

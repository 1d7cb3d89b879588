"""Every variant of the kernel that this processor can run, forced, beside the torch path.

    make variants                                          # two or three minutes
    python benchmarks/variants.py --sizes 200 100 400 200 --unlimited

Each variant is a process of its own, as `TAUT_KERNEL` is read at import. All are started at once
and asked in turn, one at a time, round after round, so that a slow minute of the machine hits all
alike. The shortest time of all rounds counts. A variant is compared with torch as it is here, and
with torch held to the instructions of the processors that the variant is for. Cold solves, sigmoid,
float64. Results go to ``results/variants.json``; a table for the documentation is printed last.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

HERE = Path(__file__).parent
SIZES = [10, 4, 64, 8, 100, 50]
# What torch may use, and the variants that are compared with it there; "0" is torch alone.
MACHINES = {
    "this": ({}, ("0", "v2", "v3", "v4")),
    "AVX2": ({"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, ("0", "v3")),
    "SSE2": ({"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}, ("0", "v2")),
}
HEAD = "     K×I |    N | threads | torch as | variant | forward ms | gain | backward ms | gain"


class Worker:
    """A process with one variant forced, on one kind of machine."""

    def __init__(self, machine: str, variant: str) -> None:
        self.machine, self.variant = machine, variant
        settings = MACHINES[machine][0] | {"TAUT_KERNEL": variant}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
            start_new_session=True,  # Ctrl-C is for the main process, which ends the others
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """What the worker answers to one line."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"The process of {self.variant} ended: {self.process.wait()}.")
        return json.loads(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def work() -> None:
    """Answer each line of the input; "missing" says that the variant cannot run here."""
    try:
        import taut  # noqa: F401
    except ImportError as error:
        failure = str(error)
        for _ in sys.stdin:
            print(json.dumps({"missing": failure}), flush=True)
        return
    problems: dict[tuple, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(_answer(question, problems) if question else {}), flush=True)


def _answer(question: dict[str, Any], problems: dict[tuple, Any]) -> dict[str, float]:
    """The shortest times of forward and backward within `seconds`, in milliseconds."""
    import torch

    from taut.backends import cpu

    if question["unlimited"]:
        cpu._MOST = dict.fromkeys(cpu._MOST, 2**62)
    torch.set_num_threads(question["threads"])
    key = tuple(question["size"]), question["samples"], question["density"]
    if key not in problems:
        problems[key] = _problem(*key)
    layer, v, b, g = problems[key]
    forward, backward, end = [], [], time.perf_counter() + question["seconds"]
    while len(forward) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        solution = layer.solve(v, b)
        middle = time.perf_counter()
        torch.autograd.grad(solution.z, v, g)
        backward.append(time.perf_counter() - middle)
        forward.append(middle - start)
    return {"forward_ms": 1e3 * min(forward), "backward_ms": 1e3 * min(backward)}


def _problem(size: tuple[int, int], samples: int, density: float) -> tuple:
    import torch

    import taut

    K, I = size
    torch.manual_seed(0)
    draw = {"dtype": torch.float64}
    A = torch.randn(I, K, **draw) * (torch.rand(I, K, **draw) < density)
    v = (2 * torch.randn(samples, K, **draw)).requires_grad_()
    b = torch.sigmoid(torch.randn(samples, K, **draw)) @ A.T
    return taut.Projection(A, activation="sigmoid"), v, b, torch.randn(samples, K, **draw)


def start() -> list[Worker]:
    """The workers that can run here; says why others cannot."""
    pairs = [(machine, variant) for machine in MACHINES for variant in MACHINES[machine][1]]
    found = [Worker(*pair) for pair in pairs]
    ready = []
    try:
        for worker in found:
            answer = worker.ask({})
            if "missing" in answer:
                worker.close()
                print(f"{worker.variant} left out: {answer['missing']}", file=sys.stderr)
            else:
                ready.append(worker)
    except BaseException:
        for worker in found:
            worker.close()
        raise
    return ready


def measure(workers: list[Worker], case: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """One record for each worker: the shortest times, and those of torch over them."""
    for worker in workers:
        worker.ask(case)  # warms up
    answers = [[worker.ask(case) for worker in workers] for _ in range(rounds)]
    records = [
        {"machine": worker.machine, "variant": worker.variant}
        | {name: case[name] for name in ("size", "samples", "threads")}
        | {key: min(answer[i][key] for answer in answers) for key in ("forward_ms", "backward_ms")}
        for i, worker in enumerate(workers)
    ]
    torch = {record["machine"]: record for record in records if record["variant"] == "0"}
    for record in records:
        beside = torch[record["machine"]]
        for part in ("forward", "backward"):
            record[f"{part}_gain"] = beside[f"{part}_ms"] / record[f"{part}_ms"]
    return records


def show(records: list[dict[str, Any]]) -> None:
    for r in records:
        size, who = "×".join(map(str, r["size"])), "torch" if r["variant"] == "0" else r["variant"]
        print(
            f"{size:>8} | {r['samples']:>4} | {r['threads']:>7} | {r['machine']:<8} | {who:<7} | "
            f"{r['forward_ms']:10.3f} | {r['forward_gain']:4.1f} | "
            f"{r['backward_ms']:11.3f} | {r['backward_gain']:4.1f}",
            flush=True,
        )


def table(records: list[dict[str, Any]]) -> str:
    """In Markdown: how many times faster than torch, forward and backward."""
    kinds = [("this", "v4"), ("AVX2", "v3"), ("this", "v3"), ("SSE2", "v2"), ("this", "v2")]
    heads = [f"{variant}, torch as {machine}" for machine, variant in kinds]
    lines = [f"| K×I | N | threads | {' | '.join(heads)} | v3 ms / v4 ms |", "|---" * 9 + "|"]
    cases: dict[tuple, dict[tuple, dict[str, Any]]] = {}
    for r in records:
        case = cases.setdefault((*r["size"], r["samples"], r["threads"]), {})
        case[r["machine"], r["variant"]] = r
    for (K, I, samples, threads), found in cases.items():
        cells = [f"{K}×{I}", str(samples), str(threads)]
        for kind in kinds:
            r = found.get(kind)
            cells.append(f"{r['forward_gain']:.1f}, {r['backward_gain']:.1f}" if r else "")
        three, four = (found.get(("this", variant)) for variant in ("v3", "v4"))
        parts = ("forward_ms", "backward_ms") if three and four else ()
        cells.append(", ".join(f"{three[part] / four[part]:.1f}" for part in parts))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="K and I, in turns")
    parser.add_argument("--samples", nargs="*", type=int, default=[16, 256])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, os.cpu_count() or 1])
    parser.add_argument("--density", type=float, default=1.0, help="the part of A that is not 0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.08, help="of one variant in a round")
    parser.add_argument("--unlimited", action="store_true", help="also plans left to torch")
    parser.add_argument("--output", type=Path, default=HERE / "results/variants.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.worker:
        return work()
    if os.getloadavg()[0] > 1:
        print("Other work is running here: times are not to be trusted.", file=sys.stderr)
    sizes = list(pairwise(options.sizes))[::2]
    cases = [
        {"size": size, "samples": samples, "threads": threads}
        | {name: getattr(options, name) for name in ("density", "seconds", "unlimited")}
        for size, samples, threads in product(sizes, options.samples, sorted(set(options.threads)))
    ]
    records: list[dict[str, Any]] = []
    workers: list[Worker] = []
    columns = BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        with Progress(
            TextColumn("{task.description}"), *columns, console=Console(stderr=True)
        ) as bar:
            task = bar.add_task("starting", total=len(cases))
            workers = start()
            print(HEAD)
            for case in cases:
                bar.update(task, description=f"{case['size'][0]}×{case['size'][1]}")
                records += (new := measure(workers, case, options.rounds))
                show(new)
                bar.advance(task)
                text = json.dumps({"load": os.getloadavg()[0], "records": records}, indent=1)
                options.output.parent.mkdir(exist_ok=True)
                options.output.write_text(text + "\n")
    except KeyboardInterrupt:
        where = f"What was finished is in {options.output}." if records else "Nothing was finished."
        print(f"Stopped. {where}", file=sys.stderr)
    finally:
        for worker in workers:
            worker.close()
    if records:
        print(table(records))


if __name__ == "__main__":
    main()

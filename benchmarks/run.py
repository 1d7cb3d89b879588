"""Side by side with the peers: one run, one machine, the same problems, errors beside the times.

    make bench                                             # everything; an hour or more
    python benchmarks/run.py --families sigmoid --samples 16 256 --budget 2 --peers moreau scipy

Every measurement is a process of its own, in its peer's environment. ``taut`` is measured before
each group of peers and once more at the end, so that a slow minute of the machine hits both; the
best of its runs counts. Results go to ``results/side_by_side.json`` and are drawn by ``plots.py``.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import plots
import reference
from environments import HERE, ensure
from problems import Array, make

RESULTS = HERE / "results"
SAMPLES = (16, 256, 2000)
TEMPERATURES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
TIMEOUT = 60  # budgets after which a measurement is ended; what it has reported counts

CVXPYLAYERS = tuple(
    f"cvxpylayers {backend} {setting}"
    for backend in ("SCS", "Clarabel", "Moreau")
    for setting in ("default", "tight")
)
POT = (
    "POT ot.batch default",
    "POT ot.batch 1e-10",
    "POT ot.batch 1e-10 sinkhorn",
    "POT ot.batch 1e-10 last_step",
    "POT ot.batch tight",
    "POT ot.sinkhorn default",
    "POT ot.sinkhorn tight",
)
SCIPY = tuple(
    f"SciPy {function} {setting}"
    for function in ("root", "minimize")
    for setting in ("default", "tight")
)
LINSATNET = ("LinSATNet default", "LinSATNet default float32", "LinSATNet tight")
_MOREAU = ("cvxpylayers Moreau default", "cvxpylayers Moreau tight")
OURS = ("taut", "taut Projection", "taut float32")

# module of peers → its environment; None is the environment of taut itself
MODULES = {
    "taut_peer": None,
    "torch_peer": None,
    "cvxpylayers_peer": "cvxpylayers",
    "pot_peer": "sinkhorn",
    "linsatnet_peer": "sinkhorn",
    "scipy_peer": "sinkhorn",
    "qpth_peer": "qpth",
    "qpax_peer": "qpax",
    "proxsuite_peer": "proxsuite",
    "pinet_peer": "pinet",
}


@dataclass(frozen=True)
class Case:
    """One family at its sizes, against groups of peers: {module: variants}."""

    family: str
    sizes: tuple[tuple[float, ...], ...]
    peers: dict[str, tuple[str, ...]]
    samples: tuple[int, ...] = SAMPLES


CASES = (
    Case(
        "sigmoid",
        ((10, 4), (64, 8), (100, 50)),
        {"cvxpylayers_peer": CVXPYLAYERS, "scipy_peer": SCIPY},
    ),
    Case(
        "doubly_stochastic",
        ((8,), (32,), (64,)),
        {"pot_peer": POT, "cvxpylayers_peer": CVXPYLAYERS},
    ),
    Case("doubly_stochastic_sigmoid", ((8,), (32,), (64,)), {"linsatnet_peer": LINSATNET}),
    Case("cover", ((10, 4), (64, 8)), {"linsatnet_peer": LINSATNET}),
    Case("nonnegative", ((64, 8),), {"linsatnet_peer": LINSATNET}),
    Case(
        "linear",
        ((10, 4), (64, 8), (100, 50)),
        {
            "torch_peer": ("torch closed form", "torch closed form, factor kept"),
            "qpth_peer": ("qpth default", "qpth tight"),
            "qpax_peer": ("qpax default", "qpax tight"),
            "cvxpylayers_peer": tuple(who for who in CVXPYLAYERS if "default" in who),
        },
    ),
    Case(
        "quadratic",
        ((100, 50, 50),),
        {
            "pinet_peer": ("PiNet 50 steps", "PiNet 50 steps float32", "PiNet tight"),
            "proxsuite_peer": ("proxsuite default", "proxsuite tight"),
            "qpth_peer": ("qpth default",),
            "cvxpylayers_peer": ("cvxpylayers Moreau default", "cvxpylayers Clarabel default"),
        },
    ),
    Case("exp_within", ((64, 8, 16),), {"cvxpylayers_peer": _MOREAU}),
    Case("sigmoid_within", ((64, 8, 16),), {"cvxpylayers_peer": _MOREAU}),
    Case("cover_within", ((64, 8, 16),), {"linsatnet_peer": LINSATNET}),
    Case(
        "softmax",
        tuple((10, temperature) for temperature in TEMPERATURES),
        {"torch_peer": ("torch softmax",), "cvxpylayers_peer": CVXPYLAYERS},
        samples=(16,),
    ),
)


def run_peer(
    module: str, who: str, family: str, size: tuple, samples: list[int], budget: float
) -> list[dict[str, Any]]:
    """Measure one variant in its environment; one record per N, with its errors."""
    environment = MODULES[module]
    python = sys.executable if environment is None else str(ensure(environment))
    with tempfile.TemporaryDirectory() as folder:
        specification = {
            "family": family,
            "size": size,
            "samples": samples,
            "variant": who,
            "budget": budget,
            "folder": folder,
        }
        command = [python, "-m", f"peers.{module}", json.dumps(specification)]
        output, failure = _output(command, TIMEOUT * budget)
        records = [json.loads(line[7:]) for line in output.splitlines() if line[:7] == "RESULT "]
        done = [_complete(record, who, family, size) for record in records]
    missing = samples[len(done) :]
    return done + [_failed(who, family, size, count, failure) for count in missing]


def _output(command: list[str], seconds: float) -> tuple[str, str]:
    """What the process printed within the time, and why it ended early if it did."""
    process = subprocess.Popen(
        command, cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, complaints = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], f"not done after {seconds:g} s"
    last = (complaints.strip().splitlines() or [""])[-1]
    return output, f"exit code {process.returncode}: {last}" if process.returncode else ""


def _failed(who: str, family: str, size: tuple, samples: int, failure: str) -> dict[str, Any]:
    return {"who": who, "family": family, "size": size, "samples": samples, "failure": failure}


@cache
def _right(family: str, size: tuple) -> tuple[Array, Array]:
    """The reference of the samples that are checked, once per problem."""
    problem = make(family, max(SAMPLES), list(size))
    few = problem.rows(reference.checked_rows(problem))
    return reference.solve(few) if few.G is None else reference.solve_within(few)


def _complete(record: dict[str, Any], who: str, family: str, size: tuple) -> dict[str, Any]:
    """Add the problem's name, the errors, and the times for all N samples."""
    with np.load(record.pop("arrays")) as arrays:
        z, gradient = arrays["z"], arrays["gradient"]
    problem = make(family, max(len(z), 1), list(size))
    record |= {"who": who, "family": family, "size": size}
    for name in ("forward", "backward"):
        record[f"{name}_ms"] = record[f"{name}_ms_per_sample"] * record["samples"]
    return record | reference.errors(problem, z, gradient, _right(family, size))


def best(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each N the run with the smallest total time."""

    def total(record: dict[str, Any]) -> float:
        return record.get("forward_ms", np.inf) + record.get("backward_ms", np.inf)

    return [min(records, key=total) for records in zip(*runs, strict=True)]


def add_ratio(records: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Total time over that of taut.project in float64 at the same N."""
    baseline = {r["samples"]: r for r in ours if r["who"] == "taut" and "failure" not in r}
    for record in records:
        base = baseline.get(record["samples"])
        if base and "failure" not in record:
            record["ratio"] = (record["forward_ms"] + record["backward_ms"]) / (
                base["forward_ms"] + base["backward_ms"]
            )


def print_table(records: list[dict[str, Any]]) -> None:
    """One line per record; ``*`` marks times extrapolated from fewer samples."""
    for r in records:
        size = "×".join(f"{s:g}" for s in r["size"])
        head = f"{r['family']:<26}| {size:>9} | {r['samples']:>4} | {r['who']:<31}"
        if "failure" in r:
            print(f"{head}| {r['failure']}", flush=True)
            continue
        star = "*" if r["extrapolated"] else " "
        print(
            f"{head}| {r['forward_ms']:>10.2f}{star}| {r['backward_ms']:>10.2f}{star}"
            f"| {r['error_z']:.0e} | {r['error_gradient']:.0e} | {r['residual']:.0e}"
            f" | {r.get('ratio', float('nan')):>8.2f}",
            flush=True,
        )


def wanted_peers(case: Case, options: argparse.Namespace) -> dict[str, list[str]]:
    """The groups of peers of a problem, without those not asked for."""
    return {
        module: [who for who in variants if _wanted(who, options.peers)]
        for module, variants in case.peers.items()
    }


def run_size(
    case: Case, size: tuple, options: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    """Everything about one problem: ours and each group of peers in turn."""
    samples = [n for n in case.samples if n in (options.samples or case.samples)]
    groups, task = wanted_peers(case, options), progress.task_ids[0]

    def measure(module: str, who: str) -> list[dict[str, Any]]:
        text = "×".join(f"{s:g}" for s in size)
        progress.update(task, description=f"{case.family} {text}: {who}")
        records = run_peer(module, who, case.family, size, samples, options.budget)
        progress.advance(task)
        return records

    ours: dict[str, list] = {who: [] for who in OURS}
    peers: list[dict[str, Any]] = []
    for variants in [*groups.items(), ("", [])]:
        for who in OURS:
            ours[who].append(measure("taut_peer", who))
        for who in variants[1]:
            peers += measure(variants[0], who)
    own = [record for runs in ours.values() for record in best(runs)]
    add_ratio(own + peers, own)
    return own + peers


def _wanted(who: str, words: list[str] | None) -> bool:
    return not words or any(word.lower() in who.lower() for word in words)


def parse() -> argparse.Namespace:
    """Options that make a run smaller; the defaults are the full run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", help="only these problems")
    parser.add_argument("--peers", nargs="*", help="only peers whose name holds one of these words")
    parser.add_argument("--samples", nargs="*", type=int, help="only these N")
    parser.add_argument("--sizes", nargs="*", type=int, help="only sizes with this first number")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds per measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="for all alike")
    parser.add_argument("--add", action="store_true", help="keep what the file has of the others")
    parser.add_argument("--output", default="side_by_side", help="name of the files in results/")
    return parser.parse_args()


def main() -> None:
    """Run, print, save after every problem, draw at the end."""
    options = parse()
    for variable in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):  # inherited by every measurement
        os.environ[variable] = str(options.threads)
    if os.getloadavg()[0] > 1:
        print("Other work is running here: times are not to be trusted.", file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{options.output}.json"
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "threads": options.threads,
        "load": os.getloadavg()[0],
    }
    records: list[dict[str, Any]] = []
    if options.add and path.exists():
        known = json.loads(path.read_text())["records"]
        records = [r for r in known if r["family"] not in (options.families or [])]
    print(
        f"{'problem':<26}| {'size':>9} | {'N':>4} | {'who':<31}| forward ms | backward ms"
        "| error z | error gradient | residual | ratio to taut     (* from fewer samples)"
    )
    todo = [
        (case, size)
        for case in CASES
        for size in case.sizes
        if case.family in (options.families or [case.family])
        and size[0] in (options.sizes or [size[0]])
    ]
    columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    bar = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
    bar.add_task("", total=sum(_measurements(wanted_peers(case, options)) for case, _ in todo))
    try:
        with bar:
            for case, size in todo:
                new = run_size(case, size, options, bar)
                print_table(new)
                records += new
                path.write_text(json.dumps({**machine, "records": records}, indent=1) + "\n")
    except KeyboardInterrupt:
        print(f"Stopped. What was finished is in {path}.", file=sys.stderr)
    if records:
        plots.draw(path)


def _measurements(groups: dict[str, list[str]]) -> int:
    """How many processes `run_size` starts."""
    return len(OURS) * (len(groups) + 1) + sum(map(len, groups.values()))


if __name__ == "__main__":
    main()

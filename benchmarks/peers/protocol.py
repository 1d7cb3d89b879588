"""What all runners share: the specification, the timing rules and the format of the answer.

A runner is started in its peer's environment, with ``benchmarks`` as working directory::

    python -m peers.pot_peer '{"family": "doubly_stochastic", "size": [8], "samples": [16, 256],
                               "variant": "ot.batch default", "budget": 10, "folder": "/tmp/out"}'

It prints one line of JSON per N (after ``RESULT ``) and saves z and the gradient of the first rows.
Only NumPy is needed here, so that no peer's environment has to hold another peer's dependencies.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import reference
from problems import Array, Problem, make

PILOT = (16, 2)  # rows on which candidate settings are compared: up to 128 outputs, and beyond
REPEATS = 7


@dataclass(frozen=True)
class Call:
    """One batch, ready to run: the forward pass, the backward pass, and what they gave."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    arrays: Callable[[Any, Any], tuple[Array, Array]]  # (forward's, backward's) → z, gradient


@dataclass(frozen=True)
class Variant:
    """A peer with settings. Of several candidates the most accurate one on pilot rows is timed."""

    prepare: Callable[[Problem, dict[str, Any]], Call]
    candidates: list[dict[str, Any]]
    families: tuple[str, ...]
    max_rows: Callable[[Problem], int] = lambda problem: len(problem.v)  # a limit set by memory


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat of one batch of ``rows`` samples."""

    rows: int
    forward: list[float]
    backward: list[float]


def run_once(call: Call) -> tuple[float, float, Any, Any]:
    """Seconds forward, seconds backward, and the two results."""
    start = time.perf_counter()
    solution = call.forward()
    middle = time.perf_counter()
    gradient = call.backward(solution)
    return middle - start, time.perf_counter() - middle, solution, gradient


def time_call(call: Call, rows: int, budget: float) -> Timing:
    """Repeat until ``REPEATS`` or the budget in seconds is reached; at least once."""
    timing, start = Timing(rows, [], []), time.perf_counter()
    while len(timing.forward) < REPEATS and (
        not timing.forward or time.perf_counter() - start < budget
    ):
        forward, backward, _, _ = run_once(call)
        timing.forward.append(forward)
        timing.backward.append(backward)
    return timing


def affordable(problem: Problem, variant: Variant, settings: dict, budget: float) -> int:
    """How many rows one repeat can hold within about a third of the budget (found by growth)."""
    limit = max(1, min(len(problem.v), variant.max_rows(problem)))
    rows = min(2, limit)
    while True:
        call = variant.prepare(problem.rows(rows), settings)
        run_once(call)  # warm-up: compilation, caches, thread pools
        seconds = sum(run_once(call)[:2])
        if rows == limit or seconds > budget / 12:
            # From here on assume time grows with the rows.
            return min(limit, max(rows, int(rows * budget / 3 / seconds)))
        rows = min(limit, 4 * rows)


def most_accurate(problem: Problem, variant: Variant, budget: float) -> dict[str, Any]:
    """The candidate whose z and gradient are best on a few rows; failures lose.

    Past the budget in seconds no further candidate is tried.
    """
    if len(variant.candidates) == 1:
        return variant.candidates[0]
    start = time.perf_counter()
    pilot = problem.rows(PILOT[problem.A.shape[1] > 128])

    def score(settings: dict[str, Any]) -> float:
        if time.perf_counter() - start > budget:
            return float("inf")
        try:
            call = variant.prepare(pilot, settings)
            _, _, solution, gradient = run_once(call)
            found = reference.errors(pilot, *call.arrays(solution, gradient))
        except Exception as failure:  # a solver that gives up at a tolerance raises what it likes
            print(f"candidate {settings}: {failure}", file=sys.stderr)
            return float("inf")
        total = found["error_z"] + found["error_gradient"]
        return total if np.isfinite(total) else float("inf")

    return min(variant.candidates, key=score)


def measure(problem: Problem, variant: Variant, settings: dict, budget: float) -> tuple[dict, dict]:
    """Timing scaled to all N rows, and the arrays of the first rows."""
    rows = affordable(problem, variant, settings, budget)
    few = problem.rows(rows)
    call = variant.prepare(few, settings)
    _, _, solution, gradient = run_once(call)
    z, gradient = call.arrays(solution, gradient)
    timing = time_call(call, rows, budget)
    per_sample, kept = 1e3 / rows, reference.checked_rows(problem)
    result = {
        "rows": rows,
        "repeats": len(timing.forward),
        "extrapolated": rows < len(problem.v),
        "settings": settings,
        "forward_ms_per_sample": min(timing.forward) * per_sample,
        "backward_ms_per_sample": min(timing.backward) * per_sample,
        "forward_median_ms_per_sample": float(np.median(timing.forward)) * per_sample,
        "backward_median_ms_per_sample": float(np.median(timing.backward)) * per_sample,
    }
    return result, {"z": z[:kept], "gradient": gradient[:kept]}


def main(variants: dict[str, Variant], versions: Callable[[], dict[str, str]]) -> None:
    """Answer the specification given on the command line, one line per N."""
    warnings.simplefilter("ignore")
    specification = json.loads(sys.argv[1])
    variant = variants[specification["variant"]]
    family, size = specification["family"], specification["size"]
    if family not in variant.families:
        raise ValueError(f"{specification['variant']} does not solve {family}")
    settings = most_accurate(make(family, PILOT[0], size), variant, 4 * specification["budget"])
    previous: dict[str, Any] = {}
    for samples in specification["samples"]:
        if previous.get("extrapolated"):
            result = previous  # the smaller N was already over budget: same time per sample
        else:
            problem = make(family, samples, size)
            result, arrays = measure(problem, variant, settings, specification["budget"])
            path = Path(specification["folder"]) / f"{samples}.npz"
            np.savez(path, **arrays)
            result |= {"arrays": str(path), "versions": versions()}
        print("RESULT " + json.dumps(result | {"samples": samples}), flush=True)
        previous = result

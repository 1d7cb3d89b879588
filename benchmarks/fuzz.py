"""Random hard problems, and an independent check of every answer.

    make fuzz N=1000000                          or, with more control,
    .venv/bin/python benchmarks/fuzz.py --samples 1000000 --seed 0 --processes 2

Samples come in blocks, of equations and of inequalities in turn (--kind); block b of seed s is
always the same. A run goes on where another stopped with the --first that it printed. The exit code
is 1 when any check failed, and each failure is printed as a snippet that rebuilds its sample.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import taut
from fuzzing.blocks import MOST
from fuzzing.runner import KINDS, reproducer, run_blocks
from fuzzing.tally import Tally, report, table


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000, help="stop after this many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="or after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("both", *KINDS), default="both")
    parser.add_argument("--first", type=int, default=0, help="number of the first block")
    parser.add_argument("--most", type=int, help="samples in a block; else so that there are many")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="0: none more")
    parser.add_argument("--out", type=Path, help="write tables and counts as JSON")
    parser.add_argument("--shown", type=int, default=5, help="failures printed in full")
    options = parser.parse_args(argv)
    if options.most is None:
        options.most = max(16, min(MOST, options.samples // 200))
    return options


def fuzz(options: argparse.Namespace, console: Console) -> Tally:
    """Run blocks until there are enough samples, the time is over or Ctrl-C is pressed."""
    tally, began = Tally(), time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} samples/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("fuzz", total=options.samples, rate=0.0)
        kinds = KINDS if options.kind == "both" else (options.kind,)
        blocks = run_blocks(options.seed, options.first, options.most, options.processes, kinds)
        with contextlib.closing(blocks), contextlib.suppress(KeyboardInterrupt):
            for part in blocks:
                tally.merge(part)
                for failure in part.failures:  # at once: a long run can be stopped, and mended
                    place = f"block {failure.block}, sample {failure.sample}"
                    console.print(
                        f"FAILED: {failure.check} ({place}: {failure.about})", markup=False
                    )
                spent = time.monotonic() - began
                text = f"fuzz: {tally.checks.total()} failed" if tally.checks else "fuzz"
                rate = tally.samples / spent
                progress.update(bar, completed=tally.samples, rate=rate, description=text)
                if tally.samples >= options.samples or spent > options.seconds:
                    break
    return tally


def show(tally: Tally, seconds: float, options: argparse.Namespace, console: Console) -> None:
    each = len(KINDS) if options.kind == "both" else 1
    for names in (("activation", "dtype"), ("target",), ("matrix",), ("logits",), ("start",)):
        console.print(table(" × ".join(names), tally.by(*names), names))
    promised = tally.promised.summary()
    of = promised["samples"]
    share = promised["converged"] / max(1, of)
    console.print(f"of the regimes promised to converge: {share:.3%} of {of:,} samples")
    for name, count in sorted(tally.looked_at.items()):
        console.print(f"  {name}: {count:,}")
    rate = tally.samples / seconds
    console.print(
        f"{tally.samples:,} samples, {tally.blocks:,} blocks, {seconds:.0f} s, {rate:,.0f}/s"
    )
    console.print(f"to go on: --most {options.most} --first {options.first + tally.blocks // each}")
    for check, count in tally.checks.most_common():
        console.print(f"[red]FAILED on {count:,} samples: {check}", highlight=False)
    seen: set[str] = set()
    for failure in tally.failures:
        if failure.check not in seen and len(seen) < options.shown:
            seen.add(failure.check)
            console.print("\n" + reproducer(failure), markup=False, highlight=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file or a pipe has room for whole words
    began = time.monotonic()
    tally = fuzz(options, console)
    seconds = time.monotonic() - began
    show(tally, seconds, options, console)
    run = {
        "command": f"benchmarks/fuzz.py --kind {options.kind} --samples {options.samples} "
        f"--seed {options.seed} --first {options.first} --most {options.most}",
        "taut": taut.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(seconds, 1),
        "samples_per_second": round(tally.samples / seconds, 1),
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(run | report(tally), indent=1, ensure_ascii=False)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 1 if tally.checks else 0


if __name__ == "__main__":
    sys.exit(main())

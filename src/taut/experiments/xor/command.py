"""`taut xor`."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from taut.experiments.xor import options
from taut.experiments.xor.figures import draw_all
from taut.experiments.xor.folder import Folder, open_folder
from taut.experiments.xor.options import DEFAULTS
from taut.experiments.xor.plain import compare
from taut.experiments.xor.runner import CHUNK, execute, plan
from taut.experiments.xor.settings import FREE, VARIANTS, Settings
from taut.experiments.xor.summary import comparison_table, summary_table, units_table
from taut.experiments.xor.teacher import Teacher
from taut.experiments.xor.threads import one_thread
from taut.experiments.xor.units import run_units


def xor(
    runs: options.Runs = None,
    epochs: options.Epochs = DEFAULTS.epochs,
    patterns: options.Patterns = DEFAULTS.patterns,
    variant: options.Variant = "all",
    batch_size: options.BatchSize = DEFAULTS.batch_size,
    optimizer: options.Optimizer = "adam",
    lr: options.LearningRate = DEFAULTS.lr,
    inputs: options.Inputs = "uniform",
    count: options.Count = "epoch",
    test_patterns: options.TestPatterns = DEFAULTS.test_patterns,
    dtype: options.Dtype = "float32",
    seed: options.Seed = DEFAULTS.seed,
    out: options.Out = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    compare_loop: options.CompareLoop = False,
    units: options.Units = False,
) -> None:
    """The XOR experiment of the paper's section 4: networks that must satisfy A z = b.

    A network is trained on XOR. New networks then learn to copy its second layer, under the four
    linear constraints that its third layer makes: A z = b for every pattern, enforced by Lagrange
    units. All runs of a variant train at once.

    Writes results.json, the numbers of every run and four figures to OUT. Ctrl-C stops it; runs
    that are finished are kept, and the same command trains the others.
    """
    kind = _kind(compare_loop, units)
    usual = {"loop": CHUNK, "units": options.UNITS_RUNS, "runs": DEFAULTS.runs}[kind]
    many = usual if runs is None else runs
    try:
        settings = Settings(
            many, epochs, patterns, batch_size, optimizer, lr, inputs, test_patterns, dtype, seed
        )
        _check_machine(device, threads)
        folder = open_folder(out or Path("xor-results") / f"{many}-{kind}", settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    names = list(VARIANTS) if variant == "all" else [variant]
    console = Console()
    try:
        if kind == "loop":
            _compare(folder, names, console)
        elif kind == "units":
            _units(folder, console)
        else:
            _experiment(folder, names, device, threads, count, console)
    except KeyboardInterrupt:
        wanted = [*names, FREE.name]
        console.print(
            f"\nStopped. {folder.finished_runs(wanted)} of {len(wanted) * settings.runs} runs are "
            f"finished and kept in {folder.path}; the same command trains the others."
        )
        raise typer.Exit(130) from None


def _kind(compare_loop: bool, units: bool) -> str:
    if compare_loop and units:
        raise typer.BadParameter("--compare-loop and --units are two things; ask for one.")
    return "loop" if compare_loop else "units" if units else "runs"


def _check_machine(device: str, threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1; got {threads}.")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch says it in either way
        raise ValueError(
            f"device {device!r} cannot be used: {str(error).splitlines()[0]}"
        ) from None


def _experiment(
    folder: Folder,
    names: list[str],
    device: str,
    threads: int | None,
    count: str,
    console: Console,
) -> None:
    started = time.perf_counter()
    # On another device one process feeds it; more would only compete.
    workers = (threads or os.cpu_count() or 1) if device == "cpu" else 1
    teacher = _teacher(folder, console)
    folder.tidy([*names, FREE.name])
    chunks = plan(folder, [*(VARIANTS[name] for name in names), FREE], workers)
    if chunks:
        kept = folder.finished_runs([*names, FREE.name])
        if kept:
            console.print(f"{kept} runs are in {folder.path} already.")
        with _progress(console) as progress:
            work = sum(len(chunk.runs) for chunk in chunks) * folder.settings.epochs
            bar = progress.add_task("epochs of runs", total=work)
            execute(folder, chunks, workers, device, lambda n: progress.advance(bar, n))
    else:
        console.print(f"All runs are in {folder.path} already.")
    results = None if chunks else folder.read_results()
    if results is None:
        facts = {
            "device": device,
            "threads": workers,
            "seconds_of_last_call": time.perf_counter() - started,
            "teacher": teacher.facts,
        }
        results = folder.write_results(facts)
    figures = draw_all(results, folder.path, count)
    console.print(summary_table(results))
    console.print(f"Wrote {folder.path}: results.json, {', '.join(path.name for path in figures)}")
    console.print(f"{(time.perf_counter() - started) / 60:.1f} minutes.")
    if folder.settings.runs < 1000:
        console.print("The paper's 1000 runs: taut xor --runs 1000, or make xor ARGS='--runs 1000'")


def _teacher(folder: Folder, console: Console) -> Teacher:
    with console.status("training the XOR network"):
        teacher = folder.teacher()
    console.print(
        f"XOR network: {teacher.accuracy:.1%} accuracy after {teacher.epochs} epochs "
        f"(seed {teacher.seed})."
    )
    return teacher


def _compare(folder: Folder, names: list[str], console: Console) -> None:
    teacher = _teacher(folder, console)
    comparisons = []
    with console.status("") as status:
        for name in names:
            status.update(f"{name}: one run alone, then {folder.settings.runs} together")
            comparisons.append(compare(folder.settings, teacher, VARIANTS[name]))
    _write(folder.path / "loop.json", [asdict(c) | {"ratio": c.ratio} for c in comparisons])
    console.print(comparison_table(comparisons))


def _units(folder: Folder, console: Console) -> None:
    teacher = _teacher(folder, console)
    with _progress(console) as progress:
        bar = progress.add_task("joint and predicted", total=folder.settings.runs)
        with one_thread():
            found = run_units(folder.settings, teacher, lambda: progress.advance(bar))
    _write(folder.path / "units.json", {"settings": folder.settings.as_dict(), **found})
    console.print(units_table(found))
    console.print(f"Wrote {folder.path / 'units.json'}")


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


class _Rate(ProgressColumn):
    """Epochs of runs per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )

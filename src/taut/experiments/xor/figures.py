"""The paper's two figures and one that compares the variants, from the contents of results.json."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from taut.experiments.xor.settings import VARIANTS

matplotlib.use("Agg", force=False)  # nothing is shown on a screen

COLORS = {"scratch": "#c44e52", "history": "#4c72b0", "newton": "#2e8b57"}
_STATISTICS = {"max": "Maximum over runs", "min": "Minimum over runs", "mean": "Mean over runs"}
_COUNTS = {
    "epoch": ("iterations", "solver iterations\nper epoch (all batches)"),
    "batch": ("iterations_per_batch", "solver iterations\nper batch"),
}


def draw_all(results: dict[str, Any], folder: Path, count: str = "epoch") -> list[Path]:
    """Write every figure the results suffice for: figure1.png to figure4.png."""
    variants = results["variants"]
    drawn: list[tuple[str, Figure]] = []
    if "scratch" in variants:
        drawn.append(("figure1.png", progress_figure(results, "scratch", count)))
    if "history" in variants:
        drawn.append(("figure2.png", progress_figure(results, "history", count)))
    if len(variants) == len(VARIANTS):
        drawn.append(("figure3.png", comparison_figure(results, count)))
    if "newton" in variants and "without_constraints" in variants["newton"]["test"]:
        drawn.append(("figure4.png", error_figure(results)))
    for name, figure in drawn:
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name, _ in drawn]


def progress_figure(results: dict[str, Any], variant: str, count: str) -> Figure:
    """The paper's figures: iterations above, loss below, and ‖λ‖ where it is carried over."""
    measure, label = _COUNTS[count]
    rows = {measure: label, "loss": "matched loss\nper pattern"}
    if VARIANTS[variant].memory:
        rows["multiplier_norm"] = "mean ‖λ‖"
    record, settings = results["variants"][variant], results["settings"]
    figure = Figure(figsize=(11, 2.6 * len(rows) + 0.8), layout="constrained")
    axes = figure.subplots(len(rows), 3, sharex=True, sharey="row", squeeze=False)
    for row, (name, ylabel) in zip(axes, rows.items(), strict=True):
        for ax, statistic in zip(row, _STATISTICS, strict=True):
            _line(ax, record[name][statistic], color=COLORS[variant])
        row[0].set_ylabel(ylabel)
        # Both fall by orders of magnitude, and most of it in the first epochs.
        if name != "multiplier_norm":
            _log(row[0])
    for ax, title in zip(axes[0], _STATISTICS.values(), strict=True):
        ax.set_title(title)
    for ax in axes[-1]:
        ax.set_xlabel("epoch")
    figure.suptitle(f"XOR Lagrange, {VARIANTS[variant].title}: {_size(settings)}")
    return figure


def comparison_figure(results: dict[str, Any], count: str) -> Figure:
    """The three variants: iterations, largest residual, wall time."""
    measure, label = _COUNTS[count]
    panels = {
        measure: (f"{label},\nmean over runs", "Solver iterations"),
        "residual": ("largest |Az − b| in the epoch", "Largest residual"),
        "seconds": ("seconds per run and epoch,\nmean over runs", "Wall time"),
    }
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for ax, (name, (ylabel, title)) in zip(axes, panels.items(), strict=True):
        for variant, record in results["variants"].items():
            values = record[name]
            _line(ax, values["mean"], color=COLORS[variant], label=VARIANTS[variant].title)
            if name == "residual":
                epochs = range(1, len(values["max"]) + 1)
                ax.fill_between(
                    epochs, values["min"], values["max"], color=COLORS[variant], alpha=0.2, lw=0
                )
        ax.set(title=title, xlabel="epoch", ylabel=ylabel)
        if name == "residual":
            ax.set_yscale("log")
        else:
            _log(ax)
    axes[1].set_title("Largest residual (line: mean, band: all runs)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"XOR Lagrange: {_size(results['settings'])}")
    return figure


def error_figure(results: dict[str, Any]) -> Figure:
    """Error to the teacher on fresh patterns: projected once at test, or trained through."""
    variants = results["variants"]
    free = variants["newton"]["test"]["without_constraints"]
    lines = {
        "no constraints": (free["error"], "0.4"),
        "no constraints,\nprojected once at test": (free["projected_error"], "0.1"),
    }
    for name, record in variants.items():
        lines[f"trained with\n{name}"] = (record["test"]["error"], COLORS[name])
    figure = Figure(figsize=(8, 0.75 * len(lines) + 1.2), layout="constrained")
    ax = figure.subplots()
    for place, (values, color) in enumerate(lines.values()):
        ax.plot([values["min"], values["max"]], [place, place], color=color, lw=3, alpha=0.4)
        ax.plot(values["mean"], place, "o", color=color, ms=8)
        ax.annotate(
            f"{values['mean']:.4f}",
            (values["mean"], place),
            (0, 8),
            ha="center",
            textcoords="offset points",
        )
    ax.set_yticks(range(len(lines)), list(lines))
    ax.set(xlabel="root mean square of z − y on fresh patterns (dot: mean, bar: all runs)")
    ax.set_ylim(len(lines) - 0.5, -0.7)
    ax.set_xlim(left=0)
    ax.grid(axis="x", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"XOR Lagrange, error to the teacher: {_size(results['settings'])}")
    return figure


def _log(ax: Axes) -> None:
    """A logarithmic axis with numbers as one writes them, also between powers of ten."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _line(ax: Axes, values: list[float], **style: Any) -> None:
    marker = "o" if len(values) == 1 else None
    ax.plot(range(1, len(values) + 1), values, lw=1.8, marker=marker, **style)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def _size(settings: dict[str, Any]) -> str:
    return (
        f"{settings['runs']} runs, {settings['patterns']} patterns, "
        f"batches of {settings['batch_size']}"
    )

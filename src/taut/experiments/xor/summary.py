"""What a person reads in the terminal."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from taut.experiments.xor.plain import Comparison


def summary_table(results: dict[str, Any]) -> Table:
    """One column for each variant, and one for the students without constraints."""
    settings, variants = results["settings"], results["variants"]
    table = Table(
        title=f"XOR Lagrange, {settings['runs']} runs of {settings['epochs']} epochs",
        caption="Means over runs; of the largest |Az − b|, the worst of all runs. Error: root mean "
        "square of z − y. Test: fresh patterns, λ solved from 0. Projected: by Newton at test, "
        "whatever was done in training.",
    )
    table.add_column("")
    for name in variants:
        table.add_column(name, justify="right", style="bold")
    table.add_column("no constraints", justify="right")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "iterations per batch, epoch 1": lambda r: _first(r["iterations_per_batch"]),
        "iterations per batch, last": lambda r: _last(r["iterations_per_batch"]),
        "iterations in total": lambda r: f"{r['total_iterations']['mean']:.0f}",
        "loss, last epoch": lambda r: f"{r['loss']['mean'][-1]:.4f}",
        "largest |Az − b|, last epoch": lambda r: f"{r['residual']['max'][-1]:.2g}",
        "‖λ‖, last epoch": lambda r: f"{r['multiplier_norm']['mean'][-1]:.3f}",
        "seconds per run": lambda r: f"{sum(r['seconds']['mean']):.2f}",
    }
    for label, cell in rows.items():
        table.add_row(label, *(cell(record) for record in variants.values()), "")
    table.add_section()
    tests = [record["test"] for record in variants.values()]
    tests += [test["without_constraints"] for test in tests[:1] if "without_constraints" in test]
    table.add_row("test: largest |Az − b|", *(f"{t['residual']['max']:.2g}" for t in tests))
    table.add_row("test: error to teacher", *(f"{t['error']['mean']:.4f}" for t in tests))
    table.add_row("test, projected: error", *(f"{t['projected_error']['mean']:.4f}" for t in tests))
    return table


def _first(values: dict[str, list[float]]) -> str:
    return f"{values['mean'][0]:.1f}"


def _last(values: dict[str, list[float]]) -> str:
    return f"{values['mean'][-1]:.1f}"


def units_table(units: dict[str, Any]) -> Table:
    """Joint and predicted multipliers, means over runs."""
    joint, predicted = units["joint"], units["predicted"]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    table = Table(
        title=f"Lagrange units without an inner solve, {len(joint)} runs", show_lines=True
    )
    table.add_column("form", style="bold")
    table.add_column("measured")
    table.add_column("mean over runs", justify="right")
    first = mean([run["residual"][0] for run in joint])
    last = mean([run["residual"][-1] for run in joint])
    table.add_row("joint", "largest |Az−b|, first → last epoch", f"{first:.3g} → {last:.3g}")
    table.add_row(
        "",
        "mean |Az−b|, first → last epoch",
        f"{mean([run['mean_residual'][0] for run in joint]):.3g} → "
        f"{mean([run['mean_residual'][-1] for run in joint]):.3g}",
    )
    for name, runs in units["solver_residual"].items():
        last = mean([run[-1] for run in runs])
        table.add_row("", f"largest |Az−b| that {name} leaves, last epoch", f"{last:.3g}")

    def average(key: str) -> float:
        return mean([run[key] for run in predicted])

    table.add_row(
        "predicted",
        "test, b unknown: largest |Az−b|, error to teacher",
        f"{average('residual'):.3g}, {average('error'):.4f}",
    )
    table.add_row(
        "",
        "test, b known, Newton from the prediction: the same",
        f"{average('solved_residual'):.2g}, {average('solved_error'):.4f}",
    )
    table.add_row(
        "",
        "Newton iterations per pattern, from 0 → from the prediction",
        f"{average('iterations_from_zero'):.2f} → {average('iterations'):.2f} "
        f"({average('saved'):.0%} saved)",
    )
    return table


def comparison_table(comparisons: list[Comparison]) -> Table:
    """A run alone in a plain loop, and among others."""
    table = Table(
        title="One run alone in a plain loop, and its share of a vectorised chunk, on one core"
    )
    table.add_column("variant", style="bold")
    for name in ("alone, s", "together, s per run", "runs together", "ratio", "losses differ by"):
        table.add_column(name, justify="right")
    for c in comparisons:
        table.add_row(
            c.variant,
            f"{c.alone:.1f}",
            f"{c.together:.3f}",
            str(c.runs),
            f"{c.ratio:.0f} ×",
            f"{c.largest_difference:.0e}",
        )
    return table

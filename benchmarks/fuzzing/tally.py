"""Counts of what happened, merged over blocks; tables and JSON from them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from fuzzing.blocks import LOGITS, STARTS, TARGETS, Block
from fuzzing.checks import Answer
from fuzzing.within import Within
from taut import Status

VERDICTS = [status.name for status in Status]
BY = ("activation", "target", "dtype", "matrix", "logits", "start", "A")
_KEPT = 200  # failures kept with their reproducer; all are counted


@dataclass(frozen=True)
class Failure:
    """One sample that failed one check."""

    seed: int
    block: int
    most: int
    sample: int
    check: str
    about: str
    kind: str = "equations"


@dataclass
class Cell:
    """Verdicts and iterations of some samples."""

    verdicts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(VERDICTS), np.int64))
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    wrong: int = 0

    def add(self, other: "Cell") -> None:
        self.verdicts = self.verdicts + other.verdicts
        steps = np.zeros(max(len(self.steps), len(other.steps)), np.int64)
        steps[: len(self.steps)] += self.steps
        steps[: len(other.steps)] += other.steps
        self.steps, self.wrong = steps, self.wrong + other.wrong

    def summary(self) -> dict[str, Any]:
        names = {name.lower(): int(n) for name, n in zip(VERDICTS, self.verdicts, strict=True)}
        names["undecided"] = names.pop("max_iterations")
        total = int(self.steps.sum())
        mean = float(self.steps @ np.arange(len(self.steps))) / total if total else 0.0
        p99 = int(np.searchsorted(np.cumsum(self.steps), 0.99 * total)) if total else 0
        return {
            "samples": int(self.verdicts.sum()),
            "silent_wrong": self.wrong,
            **names,
            "iterations_mean": round(mean, 2),
            "iterations_p99": p99,
            "iterations_max": int(np.flatnonzero(self.steps).max(initial=0)),
        }


@dataclass
class Tally:
    """Everything a run found out."""

    cells: dict[tuple[str, ...], Cell] = field(default_factory=dict)
    looked_at: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    promised: Cell = field(default_factory=Cell)
    samples: int = 0
    blocks: int = 0

    def merge(self, other: "Tally") -> None:
        for key, cell in other.cells.items():
            self.cells.setdefault(key, Cell()).add(cell)
        self.looked_at += other.looked_at
        self.checks += other.checks
        self.failures = (self.failures + other.failures)[:_KEPT]
        self.promised.add(other.promised)
        self.samples += other.samples
        self.blocks += other.blocks

    @property
    def silent_wrong(self) -> int:
        return sum(cell.wrong for cell in self.cells.values())

    def by(self, *names: str) -> dict[tuple[str, ...], Cell]:
        """Cells summed over all that is not named."""
        places = [BY.index(name) for name in names]
        sums: dict[tuple[str, ...], Cell] = {}
        for key, cell in sorted(self.cells.items()):
            sums.setdefault(tuple(key[p] for p in places), Cell()).add(cell)
        return sums


def count_block(block: Block | Within, answer: Answer, wrong: Iterable[int]) -> Tally:
    """The tally of one block; `wrong` are the samples that failed a check of their answer."""
    tally = Tally(samples=len(block), blocks=1)
    bad = np.zeros(len(block), bool)
    bad[list(set(wrong))] = True
    codes = np.stack([block.target, block.logits, block.start], axis=1)
    kinds, member = np.unique(codes, axis=0, return_inverse=True)
    shape = "shared" if block.shared else "per sample"
    for number, (target, logits, start) in enumerate(kinds):
        mask = member.reshape(-1) == number
        key = (
            block.law.label,
            block.targets[target],
            np.dtype(block.dtype).name,
            block.kind,
            LOGITS[logits],
            STARTS[start],
            shape,
        )
        tally.cells[key] = _cell(answer, mask, bad)
    promised = _promised(block)
    if promised.any():
        tally.promised = _cell(answer, promised, bad)
    return tally


def _cell(answer: Answer, mask: NDArray[np.bool_], bad: NDArray[np.bool_]) -> Cell:
    status = answer.status[mask]
    known = status[(status >= 0) & (status < len(VERDICTS))]
    return Cell(
        np.bincount(known, minlength=len(VERDICTS)),
        np.bincount(np.maximum(answer.iterations[mask], 0)),
        int(bad[mask].sum()),
    )


def _promised(block: Block | Within) -> NDArray[np.bool_]:
    """Samples of the regimes in which at least 99.9 % must converge."""
    if isinstance(block, Within):
        return block.promised
    limits = {"exp": 60, "sigmoid": 60, "tanh": 60, "srlu": 100, "linear": 1e6}
    label = block.law.label
    if block.dtype is np.float32 or block.kind != "dense" or label not in limits:
        return np.zeros(len(block), bool)
    if not 0 < block.A.shape[1] <= 50:
        return np.zeros(len(block), bool)
    calm = np.abs(block.v).max(1) <= limits[label]
    tame = block.start != STARTS.index("random")
    return block.finite & calm & tame & (block.target == TARGETS.index("interior"))


_COLUMNS = {
    "samples": "samples",
    "silent_wrong": "silent wrong",
    "undecided": "undecided",
    "converged": "converged",
    "infeasible": "infeasible",
    "inconsistent": "inconsistent",
    "nonfinite": "non-finite",
    "iterations_mean": "mean",
    "iterations_p99": "p99",
    "iterations_max": "max",
}


def table(title: str, cells: dict[tuple[str, ...], Cell], names: tuple[str, ...]) -> Table:
    """A rich table, one line for each cell and one for all."""
    result = Table(title=title, title_justify="left")
    for name in names:
        result.add_column(name)
    for name in _COLUMNS.values():
        result.add_column(name, justify="right")
    total = Cell()
    for key, cell in cells.items():
        total.add(cell)
        result.add_row(*key, *_numbers(cell))
    result.add_section()
    result.add_row("all", *[""] * (len(names) - 1), *_numbers(total))
    return result


def _numbers(cell: Cell) -> list[str]:
    summary = cell.summary()
    return [f"{summary[k]:.1f}" if k == "iterations_mean" else f"{summary[k]:,}" for k in _COLUMNS]


def report(tally: Tally) -> dict[str, Any]:
    """What goes into the JSON file."""
    total = Cell()
    for cell in tally.cells.values():
        total.add(cell)
    breakdowns = {
        " × ".join(names): [
            dict(zip(names, key, strict=True)) | cell.summary()
            for key, cell in tally.by(*names).items()
        ]
        for names in [("activation", "target", "dtype"), *((name,) for name in BY)]
    }
    return {
        "blocks": tally.blocks,
        "total": total.summary(),
        "promised to converge": tally.promised.summary(),
        "failed checks": dict(tally.checks),
        "sampled": dict(sorted(tally.looked_at.items())),
        "failures": [vars(failure) for failure in tally.failures],
        "breakdowns": breakdowns,
    }

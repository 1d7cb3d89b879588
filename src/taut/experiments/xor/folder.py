"""The results folder: settings, teacher, finished chunks, one file per variant, results.json."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

import taut
from taut.experiments.xor.files import whole
from taut.experiments.xor.settings import FREE, VARIANTS, Settings
from taut.experiments.xor.teacher import Teacher, load_teacher, train_teacher
from taut.experiments.xor.training import MEASURES, TEST_MEASURES

Arrays = dict[str, np.ndarray]


class OtherSettings(ValueError):
    """The folder holds results of other settings; they are not mixed."""


@final
@dataclass(frozen=True)
class Chunk:
    """Runs first … last (inclusive) of one variant: the unit of work, and of what is saved."""

    variant: str
    first: int
    last: int

    @property
    def runs(self) -> range:
        """The numbers of its runs."""
        return range(self.first, self.last + 1)

    @property
    def filename(self) -> str:
        """Where it is saved, in the folder `chunks`."""
        return f"{self.variant}-{self.first:06d}-{self.last:06d}.npz"


@final
@dataclass(frozen=True)
class Folder:
    """The folder at `path`, for one Settings; `open_folder` makes it."""

    path: Path
    settings: Settings

    @property
    def _chunks(self) -> Path:
        return self.path / "chunks"

    @property
    def teacher_path(self) -> Path:
        """The saved XOR network."""
        return self.path / "teacher.pt"

    def teacher(self) -> Teacher:
        """The saved XOR network, trained first if there is none."""
        if not self.teacher_path.exists():
            train_teacher(self.settings.inputs, self.settings.seed).save(self.teacher_path)
        return load_teacher(self.teacher_path)

    def is_complete(self, variant: str) -> bool:
        """Is the file of this variant there, with all runs?"""
        return (self.path / f"{variant}.npz").exists()

    def _finished(self, variant: str) -> list[Chunk]:
        names = [path.stem.split("-") for path in sorted(self._chunks.glob(f"{variant}-*.npz"))]
        return [Chunk(variant, int(first), int(last)) for _, first, last in names]

    def finished_runs(self, variants: list[str]) -> int:
        """How many runs of these variants are saved."""
        missing = sum(len(chunk.runs) for name in variants for chunk in self.missing(name, 1))
        return len(variants) * self.settings.runs - missing

    def missing(self, variant: str, size: int) -> list[Chunk]:
        """The runs not yet trained, in chunks of at most `size`."""
        if self.is_complete(variant):
            return []
        done = {run for chunk in self._finished(variant) for run in chunk.runs}
        chunks: list[Chunk] = []
        for run in range(self.settings.runs):
            if run in done:
                continue
            grows = chunks and chunks[-1].last == run - 1 and len(chunks[-1].runs) < size
            if grows:
                chunks[-1] = Chunk(variant, chunks[-1].first, run)
            else:
                chunks.append(Chunk(variant, run, run))
        return chunks

    def save(self, chunk: Chunk, record: Arrays) -> None:
        """Write a finished chunk; with the last one, the file of the variant."""
        self._chunks.mkdir(exist_ok=True)
        _write_arrays(self._chunks / chunk.filename, record)
        if not self.missing(chunk.variant, 1):
            self._merge(chunk.variant)

    def _merge(self, variant: str) -> None:
        chunks = sorted(self._finished(variant), key=lambda chunk: chunk.first)
        if not self.is_complete(variant):
            parts = [_read_arrays(self._chunks / chunk.filename) for chunk in chunks]
            names = (*MEASURES, *TEST_MEASURES)
            together = {n: np.concatenate([p[n] for p in parts]) for n in names}
            _write_arrays(self.path / f"{variant}.npz", together)
        for chunk in chunks:
            (self._chunks / chunk.filename).unlink()
        if self._chunks.exists() and not any(self._chunks.iterdir()):
            self._chunks.rmdir()

    def tidy(self, variants: list[str]) -> None:
        """Finish what an interruption has left between a variant's last chunk and its file."""
        for variant in variants:
            if not self.missing(variant, 1):
                self._merge(variant)

    def load(self, variant: str) -> Arrays:
        """MEASURES as (runs, epochs) and TEST_MEASURES as (runs,)."""
        return _read_arrays(self.path / f"{variant}.npz")

    def read_results(self) -> dict[str, Any] | None:
        """results.json as it is, if it has all variants that are complete."""
        path = self.path / "results.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        names = [name for name in VARIANTS if self.is_complete(name)]
        compared = all("without_constraints" in x["test"] for x in found["variants"].values())
        current = list(found["variants"]) == names and (compared or not self.is_complete(FREE.name))
        return found if current else None

    def write_results(self, facts: dict[str, Any]) -> dict[str, Any]:
        """results.json from the complete variants; `facts` are added to its settings."""
        names = [name for name in VARIANTS if self.is_complete(name)]
        free = self.load(FREE.name) if self.is_complete(FREE.name) else None
        settings = {
            **self.settings.as_dict(),
            "run_seeds": self.settings.run_seeds,
            "solvers": {name: repr(VARIANTS[name].solver) for name in names},
            "versions": _versions(),
            **facts,
        }
        results = {
            "settings": settings,
            "variants": {name: _over_runs(self.load(name), free) for name in names},
        }
        _write_text(self.path / "results.json", json.dumps(results, indent=1))
        return results


def open_folder(path: Path, settings: Settings) -> Folder:
    """Make the folder, or go on in one with the same settings.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp())
    >>> folder = open_folder(out, Settings(runs=3))
    >>> folder.missing("scratch", size=2)
    [Chunk(variant='scratch', first=0, last=1), Chunk(variant='scratch', first=2, last=2)]
    """
    held = path / "settings.json"
    wanted = {**settings.as_dict(), "measures": [*MEASURES, *TEST_MEASURES]}
    if held.exists():
        found = json.loads(held.read_text())
        differences = [
            f"  {key}: {found.get(key, 'not there')} in the folder, {wanted.get(key)} asked for"
            for key in sorted({*found, *wanted})
            if found.get(key) != wanted.get(key)
        ]
        if differences:
            raise OtherSettings(
                f"{path} holds results of other settings, and they would be mixed:\n"
                + "\n".join(differences)
                + "\nGive another --out, or the settings of the folder to go on with it."
            )
    elif path.exists() and not path.is_dir():
        raise OtherSettings(f"{path} is a file; --out must be a folder.")
    elif path.exists() and any(path.iterdir()):
        raise OtherSettings(
            f"{path} is not empty, and not a folder of this experiment. Give another --out."
        )
    else:
        path.mkdir(parents=True, exist_ok=True)
        _write_text(held, json.dumps(wanted, indent=1))
    return Folder(path, settings)


def statistics(values: np.ndarray) -> dict[str, list[float] | float]:
    """max, min and mean over runs, which are the first dimension.

    >>> statistics(np.array([[1.0, 2.0], [3.0, 6.0]]))
    {'max': [3.0, 6.0], 'min': [1.0, 2.0], 'mean': [2.0, 4.0]}
    """
    return {
        "max": values.max(0).tolist(),
        "min": values.min(0).tolist(),
        "mean": values.mean(0).tolist(),
    }


def _over_runs(record: Arrays, free: Arrays | None) -> dict[str, Any]:
    result: dict[str, Any] = {name: statistics(record[name]) for name in MEASURES}
    result["total_iterations"] = statistics(record["iterations"].sum(1))
    result["test"] = _test(record)
    if free is not None:
        result["test"]["without_constraints"] = _test(free)
    return result


def _test(record: Arrays) -> dict[str, Any]:
    return {name.removeprefix("test_"): statistics(record[name]) for name in TEST_MEASURES}


def _versions() -> dict[str, str]:
    return {
        "taut": taut.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _write_text(path: Path, text: str) -> None:
    with whole(path) as part:
        part.write_text(text + "\n")


def _write_arrays(path: Path, arrays: Arrays) -> None:
    with whole(path) as part, part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _read_arrays(path: Path) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}

"""What is run: the three variants of the paper's section 4 and everything the text leaves open."""

import math
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from taut.solvers import GradientDescent, Newton, Solver

INPUTS = ("uniform", "normal", "corners")
OPTIMIZERS: dict[str, type[torch.optim.Adam | torch.optim.SGD]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}

_SEED_LIMIT, _RUN_LIMIT = 10**9, 10**6


@final
@dataclass(frozen=True)
class Variant:
    """One way to treat the Lagrange units; `solver` None leaves them out."""

    name: str
    title: str
    solver: Solver | None
    memory: bool


# Sec. 4: "a threshold of 5e-3 for the average change in the loss function", α "set to 0.1 and
# then halved", "a threshold of 1e-6 for the step-size", "stop after 1000 iterations".
_PAPER = {"step": 0.1, "min_step": 1e-6, "max_iterations": 1000}

VARIANTS = {
    "scratch": Variant(
        "scratch",
        "gradient descent from 0, threshold 5e-3",
        GradientDescent(threshold=5e-3, **_PAPER),
        memory=False,
    ),
    # Sec. 4: "initialize the constraint satisfaction search in each epoch using the results from
    # the previous one. The only parameter value change […] is a threshold of 1e-3".
    "history": Variant(
        "history",
        "gradient descent with history, threshold 1e-3",
        GradientDescent(threshold=1e-3, **_PAPER),
        memory=True,
    ),
    "newton": Variant("newton", "Newton to rounding, with history", Newton(), memory=True),
}
# The same students, data and batches without constraints: what a reader compares with.
FREE = Variant("free", "no constraints", None, memory=False)


def variant_named(name: str) -> Variant:
    """One of the three, or `free`.

    >>> variant_named("history").memory
    True
    """
    known = {**VARIANTS, FREE.name: FREE}
    if name not in known:
        raise ValueError(f"unknown variant {name!r}; known: {', '.join(known)}.")
    return known[name]


@final
@dataclass(frozen=True)
class Settings:
    """One execution. What the paper fixes is the default; the rest are our choices.

    >>> Settings(runs=2).run_seeds
    [0, 1]
    >>> Settings(lr=-1.0)
    Traceback (most recent call last):
    ValueError: lr must be a positive number; got -1.0.
    """

    runs: int = 30
    epochs: int = 100
    patterns: int = 2000
    batch_size: int = 100
    optimizer: str = "adam"
    lr: float = 0.01
    inputs: str = "uniform"
    test_patterns: int = 1000
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("runs", "epochs", "patterns", "batch_size", "test_patterns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.runs > _RUN_LIMIT:
            raise ValueError(f"runs must be at most {_RUN_LIMIT}; got {self.runs}.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be a positive number; got {self.lr}.")
        if not 0 <= self.seed < _SEED_LIMIT:
            raise ValueError(f"seed must lie in 0 … {_SEED_LIMIT - 1}; got {self.seed}.")
        if self.batch_size > self.patterns:
            raise ValueError(
                f"batch_size {self.batch_size} is more than the {self.patterns} patterns there are."
            )
        tables = {"inputs": INPUTS, "optimizer": OPTIMIZERS, "dtype": DTYPES}
        for name, known in tables.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}."
                )

    @property
    def run_seeds(self) -> list[int]:
        """One seed for each run: all that a run depends on, besides the other settings."""
        return [self.seed * _RUN_LIMIT + run for run in range(self.runs)]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype the students are trained in."""
        return DTYPES[self.dtype]

    @property
    def batches(self) -> int:
        """Batches in an epoch; the last may be smaller."""
        return -(-self.patterns // self.batch_size)

    def as_dict(self) -> dict[str, Any]:
        """For results.json, and to tell whether two executions are the same."""
        return asdict(self)

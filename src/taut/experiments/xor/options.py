"""The options of `taut xor`, in the three groups that its help shows."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from taut.experiments.xor.runner import CHUNK
from taut.experiments.xor.settings import Settings

DEFAULTS = Settings()
UNITS_RUNS = 5


def _option(panel: str, text: str, *names: str, default: str | None = None) -> Any:
    """An option in a panel; `default` is shown instead of the value in the signature."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=default or True)


def _paper(text: str, **more: Any) -> Any:
    return _option("Set by the paper", text, **more)


def _choice(text: str) -> Any:
    return _option("What the paper leaves open, with our choices", text)


def _tool(text: str, *names: str, **more: Any) -> Any:
    return _option("Running it", text, *names, **more)


Runs = Annotated[
    int | None,
    _paper("Networks to train for each variant; the paper has 1000.", default=str(DEFAULTS.runs)),
]
Epochs = Annotated[int, _paper("Passes over the patterns.")]
Patterns = Annotated[int, _paper("Training patterns of each run.")]
Variant = Annotated[
    Literal["scratch", "history", "newton", "all"],
    _paper(
        "scratch: the paper's solver, from 0 in each epoch. history: the same, going on from the "
        "last epoch's λ. newton: our solver, to rounding."
    ),
]
BatchSize = Annotated[int, _choice("Patterns in a batch.")]
Optimizer = Annotated[Literal["adam", "sgd"], _choice("What trains the weights.")]
LearningRate = Annotated[float, _choice("Learning rate of the optimizer.")]
Inputs = Annotated[
    Literal["uniform", "normal", "corners"],
    _choice("Patterns uniform in the square from −1 to 1, normal, or near the corners 0 and 1."),
]
Count = Annotated[
    Literal["epoch", "batch"],
    _choice("What the figures count: solver iterations in an epoch, or per batch."),
]
TestPatterns = Annotated[int, _choice("Fresh patterns that each run is tested on.")]
Dtype = Annotated[Literal["float32", "float64"], _choice("Precision.")]
Seed = Annotated[int, _tool("Everything random follows from it.")]
Out = Annotated[
    Path | None,
    _tool(
        "Folder for the results. Finished parts that are in it are kept, not repeated.",
        default="xor-results/RUNS-runs",
    ),
]
Device = Annotated[str, _tool("Where to compute: cpu, cuda, …")]
Threads = Annotated[int | None, _tool("Processor cores to use.", default="all")]
CompareLoop = Annotated[
    bool,
    _tool(
        "Instead of the experiment: time one run alone in a plain loop against its share of many "
        f"trained at once ({CHUNK} unless --runs says otherwise).",
        "--compare-loop",
    ),
]
Units = Annotated[
    bool,
    _tool(
        "Instead of the experiment: λ trained jointly with the weights, and λ predicted by the "
        f"network ({UNITS_RUNS} runs unless --runs says otherwise).",
        "--units",
    ),
]

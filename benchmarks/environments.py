"""Make the peers' virtual environments, with pinned versions, under ``benchmarks/.envs``.

Peers disagree about their dependencies (qpth wants an older NumPy), and none of them belongs among
the dependencies of ``taut``, so each group gets its own environment::

    python environments.py               # all of them
    python environments.py cvxpylayers   # one
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE / ".envs"

_COMMON = ["numpy==2.4.6", "scipy==1.17.1"]
TORCH = "torch==2.13.0"
PINS: dict[str, list[str]] = {
    "cvxpylayers": [
        TORCH,
        *_COMMON,
        "cvxpylayers==1.2.0",
        "cvxpy==1.9.3",
        "diffcp==1.1.9",
        "scs==3.3.1",
        "clarabel==0.11.1",
        "moreau==0.4.1",
        "moreau-cpu==0.4.1",
    ],
    "sinkhorn": [TORCH, *_COMMON, "POT==0.9.7.post1", "LinSATNet==0.1.3"],
    "qpth": [TORCH, "numpy==1.26.4", "scipy==1.17.1", "qpth==0.0.18", "cvxpy==1.7.5"],
    "enforce": [
        TORCH,
        *_COMMON,
        "jaxtyping==0.3.11",
        "enforce-nn==1.0.4",
        "matplotlib==3.11.2",
        "pandas==3.1.1",
        "scikit-learn==1.9.1",
    ],
    "qpax": [*_COMMON, "qpax==0.1.4", "jax==0.10.2", "jaxlib==0.10.2"],
    "proxsuite": [TORCH, *_COMMON, "proxsuite==0.8.0"],
    "pinet": [
        *_COMMON,
        "jax==0.10.2",
        "jaxlib==0.10.2",
        "equinox==0.13.8",
        "jaxtyping==0.3.11",
        "beartype==0.23.1",
        "pinet-hcnn==0.2.0",
    ],
}
#: Of these only the package itself: what else they list is not needed here.
ALONE = ("pinet-hcnn",)


def ensure(name: str) -> Path:
    """Return the Python of environment ``name``, making or remaking it if its pins changed."""
    root = ENVIRONMENTS / name
    python = root / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = root / "pins.txt"
    pins = PINS[name]
    if stamp.exists() and stamp.read_text().split() == pins:
        return python
    print(f"[environments] {name}: making it ({', '.join(pins)})", file=sys.stderr, flush=True)
    ENVIRONMENTS.mkdir(exist_ok=True)
    (ENVIRONMENTS / ".gitignore").write_text("*\n")
    shutil.rmtree(root, ignore_errors=True)
    venv.create(root, with_pip=True)
    # torch first and alone: a peer that merely requires "torch" must find the pinned one there.
    first = [pin for pin in pins if pin.startswith("torch==")]
    alone = [pin for pin in pins if pin.startswith(ALONE)]
    rest = [pin for pin in pins if pin not in alone]
    for step in (first, rest, ["--no-deps", *alone] if alone else []):
        if step:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *step], check=True)
    stamp.write_text("\n".join(pins) + "\n")
    print(f"[environments] {name}: ready", file=sys.stderr, flush=True)
    return python


def main() -> None:
    """Make the environments named on the command line, or all of them."""
    for name in sys.argv[1:] or PINS:
        print(name, ensure(name))


if __name__ == "__main__":
    main()

"""The house: who may import whom, what the core needs, what it shows, how long its parts are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import taut

ROOT = Path(taut.__file__).parent
#: From the ground up. A module may import from its own storey's folder, and from those before.
STOREYS = [
    "autograd",
    "activations",
    "maps",
    "outcome",
    "systems",
    "analysis",
    "problems",
    "certificate",
    "backends",
    "prepare",
    "pose",
    "solvers",
    "implicit",
    "solution",
    "projection",
    "losses",
    "modules",
    "experiments",
    "cli",
]
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
each_file = pytest.mark.parametrize("path", FILES, ids=[str(x.relative_to(ROOT)) for x in FILES])


def storey(name: str) -> int:
    """Of taut.x.y: where x stands."""
    return STOREYS.index(name.split(".")[1])


def imports(tree: ast.Module) -> list[str]:
    """The modules of taut that are imported when it runs; not those for annotations only."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("taut"):
            found += (
                [f"taut.{x.name}" for x in node.names] if node.module == "taut" else [node.module]
            )
        if isinstance(node, ast.Import):
            found += [x.name for x in node.names if x.name.startswith("taut.")]
    return found


@each_file
def test_imports_go_one_way(path):
    own = storey("taut." + ".".join(path.relative_to(ROOT).with_suffix("").parts))
    for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
        assert storey(name) <= own, f"{path.name} imports {name}"


def test_the_core_needs_torch_and_jaxtyping_only():
    """Everything else that can be imported here is forbidden, and it still imports."""
    code = """
import sys
class Forbid:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("scipy", "pandas", "sklearn", "typer", "rich", "matplotlib"):
            raise ImportError(name)
import torch, jaxtyping
sys.meta_path.insert(0, Forbid())
import taut
print(taut.project(torch.zeros(2), torch.ones(1, 2), torch.ones(1)).z.tolist())
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "[0.5, 0.5]", done.stderr


def test_public_names():
    """The contract: users, examples and documents rely on these."""
    expected = (
        "Activation ConditionWarning GradientDescent Interval LagrangeHead LagrangeMemory Newton "
        "Prepared Projection Solution SolveError Solver Status activations backends bregman_loss "
        "is_certificate matched_loss prepare project"
    ).split()
    shown = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    names = [x.asname for n in shown.body if isinstance(n, ast.ImportFrom) for x in n.names]
    assert sorted(names) == sorted(expected)
    for name in expected:
        assert getattr(taut, name).__doc__, f"{name} has no docstring"


@each_file
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            start = node.body[0]
            if ast.get_docstring(node) is not None:
                length -= start.end_lineno - start.lineno + 1
            assert length <= 50, f"{path.name}: {node.name} has {length} lines"

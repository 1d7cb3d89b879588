"""The house: who may import whom, what the core needs and shows, sizes; every document runs."""

import ast
import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import taut

PACKAGE = Path(taut.__file__).parent
ROOT = Path(__file__).parent.parent
#: From the ground up. A module may import from its own storey's folder, and from those before.
STOREYS = [
    "accept",
    "autograd",
    "activations",
    "maps",
    "outcome",
    "systems",
    "analysis",
    "held",
    "problems",
    "certificate",
    "remarks",
    "backends",
    "prepare",
    "pose",
    "solvers",
    "implicit",
    "matched",
    "targets",
    "solution",
    "memory",
    "compiled",
    "projection",
    "losses",
    "head",
    "training",
    "modules",
    "distributed",
    "experiments",
    "cli",
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
each_file = pytest.mark.parametrize("path", FILES, ids=[str(x.relative_to(PACKAGE)) for x in FILES])


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
    own = storey("taut." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
        assert storey(name) <= own, f"{path.name} imports {name}"


def test_c_gets_addresses_from_one_place():
    """It checks dtype, size, layout and device; `memo` compares addresses, and reads none."""
    found = {
        str(path.relative_to(PACKAGE).as_posix())
        for path in FILES
        if any(
            isinstance(node, ast.Attribute)
            and node.attr in ("data_ptr", "untyped_storage", "ctypes")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    }
    assert found == {"backends/arrays.py", "compiled/memo.py"}


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
        "Activation ConditionWarning FailureWarning GradientDescent Interval LagrangeHead "
        "LagrangeMemory Newton Prepared Projection Solution SolveError Solver Status activations "
        "backends bregman_loss distributed is_certificate matched_loss prepare project reconcile"
    ).split()
    shown = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
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


#: Private names that tests need; where they do, a line says why nothing public will do.
PRIVATE = {"_attempt", "_efficientzerotensor", "_functions", "_MAX_PRODUCTS"}
TESTS = sorted(ROOT.glob("tests/*.py"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_tests_call_public_names(path):
    """Neither `from taut.x import _y` nor `x._y`; nor a string that names such an attribute."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("taut"):
            found |= {x.name for x in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("monkeypatch."):
            found |= {x.value for x in node.args if isinstance(x, ast.Constant)}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("taut."):
            found.add(node.value.split(".")[-1])
    private = {x for x in found if re.fullmatch(r"_[^_].*", str(x))}
    assert private <= PRIVATE


# Documents stay true by running: ```python blocks as scripts, ```pycon blocks as doctests

BLOCK = re.compile(r"^```(python|pycon)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text):
    """Each block as (language, first line number, source), in the order of the document."""
    return [(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in BLOCK.finditer(text)]


def run(text, name):
    """Runs all blocks of a document in one namespace, as a reader would from top to bottom."""
    namespace = {"__name__": "__main__"}
    for language, line, source in blocks(text):
        if language == "python":
            # The blank lines make tracebacks show the document's own line numbers.
            exec(compile("\n" * (line - 1) + source, name, "exec"), namespace)
        else:
            # Set afterwards, because DocTest copies the globals it is given.
            test = doctest.DocTestParser().get_doctest(source, {}, name, name, line - 1)
            test.globs = namespace
            report = []
            doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
            if report:
                pytest.fail("".join(report), pytrace=False)


@pytest.fixture
def as_reader(monkeypatch, tmp_path):
    """A reader has torch's default dtype, and whatever a block writes is not ours to keep."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_default_dtype(dtype)


def test_readme_has_examples_and_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert blocks(text)
    assert len(text.splitlines()) <= 200


DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


NAMED = re.compile(r"\b(?:benchmarks|docs|examples|src|tests|website)/[\w/-]+(?:\.\w+)?")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def missing_files(text, folder):
    """Files of the repository that a document names or links to, and that are not there."""
    named = [ROOT / name for name in NAMED.findall(text)]
    linked = [folder / name for name in LINK.findall(text)]
    return sorted({str(path) for path in named + linked if not path.exists()})


@pytest.mark.parametrize("document", [*DOCUMENTS, "CONTRIBUTING.md", "benchmarks/README.md"])
def test_documents_name_files_that_exist(document):
    path = ROOT / document
    assert missing_files(path.read_text(encoding="utf-8"), path.parent) == []


def test_a_file_that_does_not_exist_is_found():
    text = (
        "`tests/nowhere.py`, [API](nowhere.md#x), [out](https://elsewhere.org), tests/test_house.py"
    )
    names = [str(ROOT / "nowhere.md"), str(ROOT / "tests/nowhere.py")]
    assert missing_files(text, ROOT) == names


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.usefixtures("as_reader")
def test_examples(document):
    run((ROOT / document).read_text(encoding="utf-8"), document)


def test_later_blocks_see_earlier_names():
    run("```python\nx = 1\n```\n```pycon\n>>> y = x\n>>> y\n1\n```\n```python\nx + y\n```\n", "d")


def test_wrong_output_fails_with_its_line():
    with pytest.raises(pytest.fail.Exception, match=r'File "d", line 4'):
        run("text\n\n```pycon\n>>> 1 + 1\n3\n```\n", "d")


def test_error_names_the_documents_line():
    with pytest.raises(ZeroDivisionError) as error:
        run("text\n\n```python\n1 / 0\n```\n", "d")
    assert error.traceback[-1].lineno == 3  # counted from 0


def test_the_kernel_is_there_where_it_can_be():
    """An installation without it is right and slow, and nothing else would say so."""
    off = os.environ.get("TAUT_KERNEL") == "0" or os.environ.get("TAUT_BUILD") == "pure"
    if off or sys.platform == "win32" or not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("it is off, or there is no compiler")
    assert taut.backends.available() != "torch", "install again: the kernel was not compiled"


def test_a_call_passes_few_functions():
    """A small problem costs what Python does between the layers."""
    A, y, v = torch.randn(4, 10), torch.rand(1, 10), torch.randn(1, 10, requires_grad=True)
    b, index = y @ A.T, torch.arange(1)
    layer, memory = taut.Projection(A, activation="sigmoid"), taut.LagrangeMemory(1, 4)
    folder = str(Path(taut.__file__).parent)

    def passed(call) -> int:
        seen = []

        def note(frame, event, _):
            if event == "call" and frame.f_code.co_filename.startswith(folder):
                seen.append(frame.f_code.co_name)

        call()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return len(seen)

    def at_once():
        layer.loss(v, y, b, memory=memory, index=index).backward()

    def step():
        solution = layer.solve(v, b, init=memory[index])
        taut.matched_loss(solution, y).backward()
        memory.store(index, solution)

    if taut.backends.available() == "torch":
        pytest.skip("the loops of the torch code are as long as they must be")
    assert passed(lambda: layer.solve(v.detach(), b)) <= 15
    assert passed(step) <= 39
    assert passed(at_once) <= 12

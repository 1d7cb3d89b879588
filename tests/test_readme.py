"""Documents stay true by running: ```python blocks as scripts, ```pycon blocks as doctests."""

import doctest
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
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


def test_readme_has_examples():
    assert blocks((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", ["README.md", "docs/index.md", "docs/theory.md"])
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

"""What comes out wrong in the built site: `python website/defects.py site` fails if anything does.

Markdown and mkdocstrings drop or change things without a word: examples become quotes, `*batch`
becomes italic, a name that nobody asked for is not there. This reads the pages as a browser does.
"""

import ast
import doctest
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import taut

#: Classes that users receive and do not construct.
RECEIVED = {
    "Prepared",
    "Solution",
    "SolveError",
    "Status",
    "ConditionWarning",
    "FailureWarning",
    "Solver",
}
#: Members without an underscore that are for the library itself.
INSIDE = {
    "Newton": {"rules", "solve"},
    "GradientDescent": {"solve"},
    "Projection": {"prepared", "extra_repr"},
    "Solution": {"checked"},
    "Prepared": set(vars(taut.Prepared)) | set(taut.Prepared.__annotations__) - {"A", "activation"},
}
_VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "wbr",
}


@dataclass
class Page(HTMLParser):
    """What a page shows: its anchors, links, code, signatures, and what is out of place."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    code: str = ""
    signatures: dict[str, str] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, str]] = []  # tags with their classes
        self._name = ""  # of the object that is being described
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        kind = given.get("class", "")
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        self.links += [given[key] for key in ("href", "src") if key in given]
        if "doc-heading" in kind.split():
            self._name = given.get("id", "")
        if tag == "blockquote":
            self.defects.append("a quote: an example that is not code?")
        if tag == "em" and self._inside("doc-contents"):
            self.defects.append(f"italics in the description of {self._name}: an asterisk?")
        if tag not in _VOID:
            self._open.append((tag, kind))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tags = {tag for tag, _ in self._open}
        if self._inside("doc-signature"):
            self.signatures[self._name] = self.signatures.get(self._name, "") + data
        if "pre" in tags:
            self.code += data
        elif not tags & {"code", "script", "style", "title"}:
            for mark in ("`", "**", ">>>"):
                if mark in data:
                    self.defects.append(f"{mark} in the text: {data.strip()[:60]!r}")

    def _inside(self, kind: str) -> bool:
        return any(kind in classes.split() for _, classes in self._open)


def public_names() -> dict[str, object]:
    """Every public name with what it stands for, as users write it."""
    names: dict[str, object] = {"taut.backends.available": taut.backends.available}
    for module in (taut, taut.activations):
        tree = ast.parse(inspect.getsource(module))
        shown = [x.asname for n in tree.body if isinstance(n, ast.ImportFrom) for x in n.names]
        for name in filter(None, shown):
            thing = getattr(module, name)
            if not inspect.ismodule(thing) and all(thing is not other for other in names.values()):
                names[f"{module.__name__}.{name}"] = thing
    return names


def canonical(name: str, thing: object) -> str:
    """Where a class or function is defined; of other things, where they are shown."""
    return f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else name


def members(thing: type) -> Iterator[str]:
    """The public attributes, properties and methods of a class itself."""
    own = {**vars(thing), **inspect.get_annotations(thing)}
    hidden = INSIDE.get(thing.__name__, set())
    yield from sorted(name for name in own if not name.startswith("_") and name not in hidden)


def api_defects(page: Page, names: dict[str, object]) -> list[str]:
    """Names that are missing, signatures without a parameter, examples that are not shown."""
    defects = []
    for name, thing in names.items():
        place = next((x for x in (name, canonical(name, thing)) if x in page.anchors), None)
        if place is None:
            defects.append(f"{name} is missing")
            continue
        shown = page.signatures.get(place, "")
        if isinstance(thing, type):
            defects += [
                f"{name}.{member} is missing"
                for member in members(thing)
                if f"{place}.{member}" not in page.anchors and not re.search(rf"\b{member}:", shown)
            ]
        constructed = not isinstance(thing, type) or thing.__name__ not in RECEIVED
        if callable(thing) and constructed:
            parameters = inspect.signature(thing).parameters
            lacking = [x for x in parameters if not re.search(rf"\b{x}\b[:=,)]", shown)]
            if lacking or not shown:
                defects.append(f"the signature of {name} lacks {', '.join(lacking) or 'all'}")
        documented = isinstance(thing, type) or inspect.isroutine(thing)
        for example in doctest.DocTestParser().get_examples((documented and thing.__doc__) or ""):
            first = example.source.splitlines()[0]
            if f">>> {first}" not in page.code:
                defects.append(f"an example of {name} is not shown as code: {first}")
    return defects


def dead_links(page: Page, site: dict[Path, Page], root: Path) -> list[str]:
    """Links to files and anchors of the site that are not there."""
    dead = []
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        base = root if parts.path.startswith("/") else page.path.parent
        target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page.path
        target = target / "index.html" if target.is_dir() else target
        if not target.exists():
            dead.append(f"dead link: {link}")
        elif parts.fragment and target in site:
            if unquote(parts.fragment) not in site[target].anchors:
                dead.append(f"dead link: no such place {link}")
    return dead


def defects(root: Path, names: dict[str, object]) -> list[str]:
    """All of them, each with its page."""
    root = root.resolve()
    # The page for addresses that do not exist is served from anywhere: its links are absolute.
    pages = {path: Page(path) for path in sorted(root.rglob("*.html")) if path.name != "404.html"}
    found = [] if root / "api/index.html" in pages else [(root, "there is no page api")]
    for path, page in pages.items():
        texts = page.defects + dead_links(page, pages, root)
        if path.parent == root / "api":
            texts += api_defects(page, names)
        found += [(path.parent, text) for text in texts]
    return [f"{where.relative_to(root)}: {text}" for where, text in found]


def main() -> int:
    """Print the defects; the exit code says whether there are any."""
    found = defects(Path(sys.argv[1]), public_names())
    print("\n".join(found) or "The pages show what they should.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

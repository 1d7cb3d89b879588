"""For the API page: docstrings are plain text with backquotes and doctests, not Markdown."""

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def markdown(text: str) -> str:
    """A docstring as Markdown that shows what the source shows.

    >>> markdown("Of v (*batch, K): `*batch` is any shape.")
    'Of v (\\\\*batch, K): `*batch` is any shape.'
    >>> markdown(">>> 1 + 1\\n2\\n\\nMore.").splitlines()
    ['```pycon', '>>> 1 + 1', '2', '```', '', 'More.']
    """
    text = _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", text)
    # Of a split by one group, every second part is what the group found: code, left as it is.
    parts = _CODE.split(text)
    parts[::2] = (re.sub(r"([*_<])", r"\\\1", part) for part in parts[::2])
    return "".join(parts)


class Docstrings(Extension):
    """Griffe, which reads the sources for mkdocstrings, calls this for everything it finds."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

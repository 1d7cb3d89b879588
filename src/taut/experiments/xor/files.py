"""Files that are there complete, or not at all: Ctrl-C may come at any time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write to; what is there in the end becomes `path`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with whole(path) as part:
    ...     part.touch()
    ...     path.exists()
    False
    >>> path.exists(), part.exists()
    (True, False)
    """
    part = path.with_suffix(".part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise

"""The command `taut`. What it needs beyond the library is in the extra `taut[cli]`."""

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

_NEEDS = ("typer", "rich", "matplotlib", "numpy")


def main() -> None:
    """The entry point; says what to install when something is missing."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"taut: the command line needs {', '.join(missing)}, which is not installed here.\n"
            "Install it with: pip install 'taut[cli]'"
        )
    build()()


def build() -> "typer.Typer":
    """The typer application with all its commands."""
    import typer

    from taut.experiments.xor.command import xor

    app = typer.Typer(
        help="Neural networks whose outputs satisfy constraints exactly.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    app.callback()(_taut)
    app.command("xor")(xor)
    return app


def _taut() -> None:
    """Neural networks whose outputs satisfy constraints exactly."""


if __name__ == "__main__":
    main()

"""The command `fx-fusion`: what the library knows, for people at a terminal and for scripts."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command; says what to install where its libraries are missing."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f'fx-fusion needs {" and ".join(missing)}: pip install "fx-fusion[cli]"',
            file=sys.stderr,
        )
        raise SystemExit(2)
    from fx_fusion.cli.app import app

    app()

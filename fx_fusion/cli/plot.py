"""`fx-fusion plot`: draw a benchmark's CSV file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Final

import typer

SUFFIXES: Final = (".svg", ".png", ".pdf")


def register(app: typer.Typer) -> None:
    """Add the command `plot`."""
    app.command("plot")(plot)


def plot(
    file: Annotated[Path, typer.Argument(help="A CSV file that fx-fusion bench wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help=f"The picture: {', '.join(SUFFIXES)} (default FILE.svg)."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead.")
    ] = False,
) -> None:
    """Draw a benchmark's CSV file: times and speed-ups, the conditions in the caption."""
    from fx_fusion.bench.draw import draw, save
    from fx_fusion.bench.results import ResultsError, read

    target = output or file.with_suffix(".svg")
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ResultsError('matplotlib is missing: pip install "fx-fusion[cli]"')
        if target.suffix not in SUFFIXES:
            raise ResultsError(f"-o {target}: give a name that ends in {', '.join(SUFFIXES)}.")
        picture = read(file)
        save(draw(picture), target)
    except (ResultsError, OSError) as error:
        typer.echo(f"fx-fusion plot: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        document = {
            "input": str(file),
            "output": str(target),
            "bench": picture.bench,
            "panels": [panel.title for panel in picture.panels],
            "caption": picture.caption,
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(f"{target}: {len(picture.panels)} panels of the benchmark {picture.bench}")

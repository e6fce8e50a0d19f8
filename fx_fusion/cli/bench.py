"""`fx-fusion bench`: the benchmarks under one look.

Each takes the options of its `python -m` form, and `--json`. Progress goes to stderr, and only
to a terminal; stdout has the table or the JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import typer
from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fx_fusion.errors import FxFusionError

if TYPE_CHECKING:  # it imports torch, which `--help` needs not
    from fx_fusion.bench import common

#: Each benchmark's name, its module, and what it measures.
BENCHES: Final = {
    "cpu": ("cpu", "One site on CPU: our kernel beside Inductor and eager over gloo."),
    "cpu-step": ("cpu_step", "A whole step of a Llama-shaped model on CPU."),
    "decode": ("decode", "Decode steps of model shapes, Inductor's one-shot beside ours."),
    "kernels": ("kernels", "The GPU kernel beside FlashInfer and unfused, in CUDA graphs."),
    "pass-cost": ("pass_cost", "What the pass adds to a compilation, by layers."),
    "compile": ("pass_cost", "Another name of pass-cost."),
}
_TICK_SECONDS: Final = 0.2
#: What the widest table needs.
_TABLE_COLUMNS: Final = 100


def register(app: typer.Typer) -> None:
    """Add `bench` and a command below it for each benchmark."""
    group = typer.Typer(
        help="Measure: fused beside unfused, in one run. Each benchmark has its own --help.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for name, (module, summary) in BENCHES.items():
        _add(group, name, module, summary)
    app.add_typer(group, name="bench")


def _add(group: typer.Typer, name: str, module: str, summary: str) -> None:
    # The options are the module's own, so --help and all else is left to its parser.
    @group.command(
        name,
        help=summary,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )
    def command(context: typer.Context) -> None:
        raise typer.Exit(run(module, f"fx-fusion bench {name}", list(context.args)))


def run(module: str, program: str, arguments: list[str]) -> int:
    """Measure and show; returns the exit status."""
    from fx_fusion.bench import common

    bench = cast("common.Bench", import_module(f"fx_fusion.bench.{module}").BENCH)
    parser = common.parser_of(bench, program)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    options = parser.parse_args(arguments)
    cause = common.problem(bench, options)
    if "WORLD_SIZE" in os.environ:
        cause = "a benchmark starts its ranks itself; run it without torchrun."
    if cause:
        typer.echo(f"{program}: {cause}", err=True)
        return 2
    arguments = [word for word in arguments if word != "--json"]
    given = options.conditions = common.conditions(bench, program, arguments)
    try:
        with progress_file(program, bench.cells(options)) as progress:
            rows = bench.run(options, progress)
    except FxFusionError as error:
        typer.echo(f"{program}: {error}", err=True)
        return 2
    if options.csv is not None:
        common.write_csv(options.csv, rows, given)
    if options.json:
        document = {"bench": bench.name, "conditions": given, "rows": [asdict(r) for r in rows]}
        typer.echo(json.dumps(document, indent=2))
    else:
        show(bench, options, rows, given)
    return 0


def show(
    bench: common.Bench,
    options: argparse.Namespace,
    rows: list[object],
    given: dict[str, str],
) -> None:
    """Print the table, what it was measured with, and where it was written."""
    shown = bench.table(rows, options)
    console = Console(highlight=False)
    # rather a line that the terminal wraps than a figure cut off
    console.width = max(console.width, _TABLE_COLUMNS)
    drawn = rich_table.Table(box=box.SIMPLE_HEAD if console.is_terminal else None)
    for title in shown.header:
        drawn.add_column(title, justify="right", no_wrap=True)
    for line in shown.lines:
        drawn.add_row(*line)
    console.print(shown.title, markup=False)
    console.print(
        f"on {given['machine']}, {given['cores']} cores, {given['date']}", markup=False
    )
    if shown.note:
        console.print(shown.note, markup=False)
    console.print(drawn)
    if options.csv is not None:
        console.print(f"written to {options.csv}; draw it: fx-fusion plot {options.csv}")


@contextmanager
def progress_file(title: str, cells: int) -> Iterator[str]:
    """A file in which cells that are done are counted, shown as a bar on a terminal.

    Yields:
        Its path, "" where nobody looks.
    """
    if not sys.stderr.isatty():
        yield ""
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="fx_fusion_bench_") as folder,
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
    ):
        path = Path(folder) / "cells"
        path.touch()
        task = bar.add_task(title, total=cells)
        done = threading.Event()

        def follow() -> None:
            while not done.wait(_TICK_SECONDS):
                bar.update(task, completed=path.stat().st_size)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield str(path)
        finally:
            done.set()
            follower.join()

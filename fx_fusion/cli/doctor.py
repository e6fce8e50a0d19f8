"""`fx-fusion doctor`: what of this machine, or of these ranks, stands in the way."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fx_fusion.doctor.check import Check

_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}
_PIPED_COLUMNS: Final = 100


def register(app: typer.Typer) -> None:
    """Add the command `doctor`."""
    app.command("doctor")(doctor)


def doctor(
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the other ranks, under torchrun.", min=1)
    ] = 60.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead.")
    ] = False,
) -> None:
    """Check versions, GPUs, shared memory, compilers and set-up; say what to do.

    Under torchrun it compares the ranks and names those that differ; rank 0 prints. Exit status
    1 if a check fails.
    """
    from fx_fusion.doctor import ranks
    from fx_fusion.doctor.check import worst
    from fx_fusion.doctor.examination import examine, examine_ranks

    several = ranks.started_by_torchrun()
    rank, checks = examine_ranks(timeout) if several else (0, examine())
    lost = any(check.name == "ranks" and check.status == "fail" for check in checks)
    if rank == 0:
        show(checks, as_json=as_json)
    elif lost:
        typer.echo(f"rank {rank}: {checks[-1].text}", err=True)
    if several and not lost:
        ranks.leave()
    # one rank's status is enough, and torchrun ends the others when one of them fails
    if worst(checks) == "fail" and (rank == 0 or lost):
        raise typer.Exit(1)


def show(checks: list[Check], *, as_json: bool) -> None:
    """Print the checks, as a table or as JSON."""
    from fx_fusion.doctor.check import STATUSES, worst

    if as_json:
        keys = ("name", "status", "text", "remedy")
        lines = [{key: asdict(check)[key] for key in keys} for check in checks]
        typer.echo(json.dumps({"status": worst(checks), "checks": lines}, indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_COLUMNS
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(
            f"[{_COLOURS[check.status]}]{check.status}[/]",
            _plain(check.name),
            _plain(check.text),
        )
        if check.remedy and check.status != "ok":
            table.add_row("", "", _plain(f"-> {check.remedy}"))
    console.print(table)
    counts = (sum(check.status == status for check in checks) for status in STATUSES)
    console.print("{} ok, {} to look at, {} failed".format(*counts))


def _plain(text: str) -> str:
    """Text in which brackets are brackets."""
    from rich.markup import escape

    return escape(text)

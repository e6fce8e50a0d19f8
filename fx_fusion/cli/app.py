"""The commands of `fx-fusion`, each in a module of its own.

Exit statuses: 0 done and well; 1 done, and something is not as it should be (a failed check, a
snapshot that differs); 2 the command could not be run as given.
"""

from __future__ import annotations

import typer

app = typer.Typer(
    name="fx-fusion",
    help="Fuse all_reduce + residual add + RMSNorm of tensor-parallel models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def top() -> None:
    """Fuse all_reduce + residual add + RMSNorm of tensor-parallel models."""


@app.command()
def version() -> None:
    """Print the versions of fx_fusion and torch."""
    import torch

    import fx_fusion

    typer.echo(f"fx_fusion {fx_fusion.__version__}, torch {torch.__version__}")


# Each command is a module of its own, and needs `app`.
from fx_fusion.cli import bench, doctor, explain, plot, snapshot  # noqa: E402

bench.register(app)
plot.register(app)
doctor.register(app)
explain.register(app)
snapshot.register(app)

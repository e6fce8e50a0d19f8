"""Whole decode steps of model shapes: eager, Inductor's own one-shot, fx_fusion, in one run.

    python -m fx_fusion.bench.decode --shapes gpt-oss-20b --tokens 1,8,32 --csv decode.csv

A step gives each of `tokens` sequences one new token, over a key-value cache, through a few
layers with random weights (`decode_models`). Candidates:

* eager: PyTorch without a compiler; the group's all_reduce (gloo's where ranks share a GPU).
* inductor: torch.compile with Inductor's lowering of all_reduce to symmetric memory's one-shot
  kernel, at every size. The benchmark ends with an error if the generated code lacks it. On the
  CPU there is no such lowering: there it is Inductor over gloo.
* nccl: torch.compile over NCCL's all_reduce, where every rank has a GPU of its own.
* fx_fusion: torch.compile with this package's backend.

Those on a GPU are timed as they are and, with " graph" in the name, replayed from a CUDA graph
that was captured by hand. A figure is the median over rounds, and its quartiles, of the slowest
rank's step: from its begin to the end of its last kernel. Host time is the clock's from call to
return, without waiting for the GPU, of the slowest rank. Every output is compared with eager's,
and fx_fusion's bit by bit between the ranks. Compilations for a GPU are cold.

Ranks that share a GPU should run side by side, under an MPS daemon (--mps starts one, or the
environment's CUDA_MPS_PIPE_DIRECTORY names one); else they take turns, and the figures tell
nothing. Such figures are for regressions: there is no link between the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from fx_fusion.bench import common
from fx_fusion.bench.common import Bench, Table, add_dtype, add_number, add_numbers
from fx_fusion.bench.decode_models import SHAPES
from fx_fusion.bench.decode_rank import FUSED, GRAPH, Job, Measured, measure
from fx_fusion.bench.kernel_runs import daemon_cause, mps_daemon, told_to_end
from fx_fusion.errors import SpawnError
from fx_fusion.settings import KERNELS
from fx_fusion.testing import spawn

TOKENS: Final = (1, 8, 32, 64, 128)


@dataclass(frozen=True)
class Row:
    """One candidate at one shape and number of tokens.

    `median`, `low` and `high` are microseconds a step, `host` those of the host alone,
    `peak_mib` what a step takes from torch's allocator beyond what was there (MiB), and
    `difference` the output's relative distance from eager's.
    """

    shape: str
    candidate: str
    world_size: int
    tokens: int
    hidden_size: int
    layers: int
    cache_length: int
    dtype: str
    median: float
    low: float
    high: float
    host: float
    compile_seconds: float
    peak_mib: float
    sites: int
    fused_sites: int
    difference: float
    same_on_ranks: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=tuple(SHAPES),
        default=tuple(name for name in SHAPES if name != "tiny"),
        metavar="NAME",
        help=f"of {', '.join(SHAPES)} (default all but tiny)",
    )
    add_number(parser, "--world-size", 2, "ranks")
    add_dtype(parser)
    add_numbers(parser, "--tokens", default=TOKENS, what="sequences that get a token")
    add_number(parser, "--layers", 4, "decoder layers")
    add_number(parser, "--cache-length", 1024, "places of the key-value cache")
    add_number(parser, "--rounds", 30, "timed steps of each candidate", least=2)
    parser.add_argument(
        "--kernel",
        choices=KERNELS,
        default="fx_fusion",
        help="fx_fusion's setting of that name; auto takes what the table of measurements says"
        " (default fx_fusion)",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)"
    )
    parser.add_argument(
        "--cpp-wrapper",
        action="store_true",
        help="Inductor's C++ wrapper launches the compiled candidates' kernels, but for its own"
        " one-shot, which can't be compiled so",
    )
    parser.add_argument(
        "--mps",
        action="store_true",
        help="where ranks share a GPU: run them side by side, under an MPS daemon of their own",
    )
    add_number(parser, "--timeout", 600, "seconds for everything")


def cells_of(options: argparse.Namespace) -> list[tuple[str, int]]:
    """The cells of a run: shape and tokens."""
    return list(itertools.product(options.shapes, options.tokens))


def run(options: argparse.Namespace, progress: str = "") -> list[Row]:
    """Measure every cell on real ranks."""
    if options.device == "cuda" and torch.cuda.device_count() < options.world_size:
        # Ranks that share a GPU can't load a kernel while one of another waits for them.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    with tempfile.TemporaryDirectory(prefix="fx_fusion_bench_") as folder:
        job = Job(
            device=options.device,
            dtype=options.dtype,
            layers=options.layers,
            cache_length=options.cache_length,
            rounds=options.rounds,
            kernel=options.kernel,
            cpp_wrapper=options.cpp_wrapper,
            cells=cells_of(options),
            results=str(Path(folder) / "results"),
            progress=progress,
        )
        try:
            with mps_daemon() if options.mps else contextlib.nullcontext(), told_to_end():
                spawn(
                    measure,
                    options.world_size,
                    device=options.device,
                    timeout=options.timeout,
                    args=(job,),
                )
        except SpawnError as error:
            rows = _rows(options, Path(job.results))
            if not rows:
                raise
            if options.csv is not None:
                common.write_csv(options.csv, rows, options.conditions)
            shown = common.plain(table(rows, options))
            raise SpawnError(f"{error}\n\nMeasured before that:\n{shown}") from None
        return _rows(options, Path(job.results))


def _rows(options: argparse.Namespace, path: Path) -> list[Row]:
    """The rows of the cells that are done, from the file that rank 0 has written."""
    rows: list[Row] = []
    with contextlib.suppress(FileNotFoundError, EOFError), path.open("rb") as file:
        for shape, tokens in cells_of(options):
            ranks: list[dict[str, Measured]] = pickle.load(file)
            rows += [
                _row(options, shape, tokens, name, [rank[name] for rank in ranks])
                for name in ranks[0]
            ]
    return rows


def _row(
    options: argparse.Namespace, shape: str, tokens: int, name: str, ranks: list[Measured]
) -> Row:
    slowest = [max(step) for step in zip(*(rank.step for rank in ranks), strict=True)]
    host = [max(step) for step in zip(*(rank.host for rank in ranks), strict=True)]
    low, median, high = statistics.quantiles(slowest, n=4, method="inclusive")
    return Row(
        shape=shape,
        candidate=name,
        world_size=options.world_size,
        tokens=tokens,
        hidden_size=SHAPES[shape].hidden_size,
        layers=options.layers,
        cache_length=options.cache_length,
        dtype=options.dtype,
        median=round(median, 1),
        low=round(low, 1),
        high=round(high, 1),
        host=round(statistics.median(host), 1),
        compile_seconds=round(max(rank.compile_seconds for rank in ranks), 2),
        peak_mib=round(max(rank.peak_mib for rank in ranks), 2),
        sites=ranks[0].sites,
        fused_sites=ranks[0].fused_sites,
        difference=float(f"{max(rank.difference for rank in ranks):.3g}"),
        same_on_ranks=ranks[0].same_on_ranks,
    )


def ours_beside(row: Row, rows: Sequence[Row]) -> Row:
    """fx_fusion's row of the same cell, in a CUDA graph if the other one is."""
    name = FUSED + GRAPH if row.candidate.endswith(GRAPH) else FUSED
    return next(
        other
        for other in rows
        if (other.candidate, other.shape, other.tokens) == (name, row.shape, row.tokens)
    )


def table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """One line for each candidate at each shape and number of tokens."""
    lines = []
    for row in rows:
        is_ours, ours = row.candidate.startswith(FUSED), ours_beside(row, rows)
        lines.append(
            (
                row.shape,
                str(row.tokens),
                row.candidate,
                f"{row.median:.1f} ({row.low:.1f}-{row.high:.1f})",
                "" if is_ours else f"{row.median / ours.median:.2f}x",
                f"{row.host:.0f}" + ("" if is_ours else f" {row.host / ours.host:.2f}x"),
                f"{row.compile_seconds:.1f}" if row.compile_seconds else "",
                f"{row.peak_mib:.1f}",
                f"{row.fused_sites}/{row.sites}" if is_ours else "",
                f"{row.difference:.1e}",
            )
        )
    return Table(
        f"decode step of {options.layers} layers, {options.world_size} ranks, {options.dtype},"
        f" cache {options.cache_length}, torch {torch.__version__}"
        f"{', C++ wrapper' if options.cpp_wrapper else ''}: us, median (quartiles) of"
        f" {options.rounds}, slowest rank; x = over fx_fusion",
        (
            *("shape", "tokens", "candidate", "us a step", "x"),
            *("host us", "compile s", "MiB", "fused", "from eager"),
        ),
        tuple(lines),
        _sharing_note(options),
    )


def _sharing_note(options: argparse.Namespace) -> str:
    gpus = torch.cuda.device_count()
    if options.device == "cpu" or gpus >= options.world_size:
        return ""
    mps = options.mps or os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    how = "under MPS" if mps else "in turns"
    return (
        f"The ranks share {gpus} GPU(s) {how}: figures for regressions, not for a machine with"
        " a GPU each."
    )


def cannot(options: argparse.Namespace) -> str:
    """Why it can't run here, or with these options."""
    if options.device == "cuda" and not torch.cuda.device_count():
        return "torch sees no GPU here; --device cpu runs without one."
    if options.mps and options.device == "cpu":
        return "--mps is for ranks that share a GPU; leave it out with --device cpu."
    if options.mps and (cause := daemon_cause(1, options.world_size)):
        return cause.replace("--daemons 1", "--mps")
    for name in options.shapes:
        shape = SHAPES[name]
        if shape.kv_heads % options.world_size or shape.mlp_size % options.world_size:
            return (
                f"--world-size {options.world_size} doesn't divide the {shape.kv_heads}"
                f" key-value heads and the MLP size {shape.mlp_size} of {name}."
            )
    return ""


def machine() -> str:
    """The GPUs' name and number; the processor's name where there is none."""
    gpus = torch.cuda.device_count()
    return f"{gpus} x {torch.cuda.get_device_name()}" if gpus else ""


BENCH: Final = Bench(
    name="decode",
    module="decode",
    summary="Decode steps of model shapes: eager, Inductor's own one-shot, fx_fusion.",
    add_options=add_options,
    cells=lambda options: len(cells_of(options)),
    run=run,
    table=table,
    cannot=cannot,
    machine=machine,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; see `--help` for the options."""
    return common.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())

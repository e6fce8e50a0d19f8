"""A whole step of a Llama-shaped model on CPU: eager, Inductor, fx_fusion, side by side in one run.

    python -m fx_fusion.bench.cpu_step --tokens 1,8,64 --csv cpu_step.csv

The model is transformers' `LlamaForCausalLM` with random weights, made tensor-parallel by
transformers' own plan over gloo. A step gives every one of `tokens` sequences one new token;
there is no key-value cache, so what is timed is the projections, the MLPs and the sites.

The ways take turns, so that what else the machine does falls on all alike. A figure is the
median over rounds of the slowest rank's step.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from fx_fusion.bench import common
from fx_fusion.bench.common import (
    Bench,
    Table,
    add_dtype,
    add_number,
    add_numbers,
    count_cell,
)
from fx_fusion.bench.cpu import keep_freed_memory, threads_a_rank
from fx_fusion.demo_rank import (
    HEAD_SIZE,
    VOCABULARY,
    Job,
    load_shard,
    logits_of,
    save_model,
    step_seconds,
)
from fx_fusion.report import FusionReport
from fx_fusion.testing import spawn

WAYS: Final = ("eager", "inductor", "fx_fusion")
WARM_UP: Final = 5


@dataclass(frozen=True)
class Row:
    """One number of tokens: milliseconds a step for each way; `speed_up` is inductor / fx_fusion."""

    world_size: int
    dtype: str
    layers: int
    hidden_size: int
    tokens: int
    sites: int
    fused_sites: int
    eager: float
    inductor: float
    fx_fusion: float
    speed_up: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    add_number(parser, "--world-size", 2, "ranks")
    add_dtype(parser)
    add_number(parser, "--layers", 4, "decoder layers")
    add_number(
        parser, "--hidden-size", 2048, f"hidden size, a multiple of {HEAD_SIZE} times the ranks"
    )
    add_numbers(parser, "--tokens", default=(1, 8, 64), what="sequences that get a token")
    add_number(parser, "--rounds", 40, "timed steps")


def run(options: argparse.Namespace, progress: str = "") -> list[Row]:
    """Measure every number of tokens on real ranks."""
    with tempfile.TemporaryDirectory(prefix="fx_fusion_bench_") as directory:
        job = Job(
            directory=directory,
            layers=options.layers,
            hidden_size=options.hidden_size,
            dtype=options.dtype,
            device="cpu",
            batch=1,
            tokens=1,
            steps=options.rounds,
        )
        ranks = spawn(
            measure,
            options.world_size,
            timeout=900,
            args=(job, list(options.tokens), progress),
        )
    return [_row(options, index, count, ranks) for index, count in enumerate(options.tokens)]


@dataclass(frozen=True)
class Measured:
    """What a rank saw for one number of tokens: seconds of each step of each way, and the sites."""

    seconds: dict[str, list[float]]
    sites: int
    fused_sites: int


def measure(
    rank: int, world_size: int, job: Job, tokens: list[int], progress: str = ""
) -> list[Measured]:
    """On one rank: load the shard, then time the three ways for each number of tokens."""
    import fx_fusion

    torch.set_num_threads(threads_a_rank(world_size))
    keep_freed_memory()
    if rank == 0:
        save_model(job)
    dist.barrier()
    model = load_shard(rank, world_size, job)
    measured = []
    for count in tokens:
        torch._dynamo.reset()
        fx_fusion.clear_reports()
        ids = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
        models = {
            "eager": model,
            "inductor": torch.compile(model, backend="inductor"),
            "fx_fusion": torch.compile(model, backend="fx_fusion"),
        }
        ways = {name: partial(logits_of, way) for name, way in models.items()}
        with torch.no_grad():
            seconds = step_seconds(ways, ids, job.steps, warm_up=WARM_UP)
        report = FusionReport.merged(fx_fusion.reports())
        measured.append(Measured(seconds, report.site_count, report.fused_count))
        if rank == 0:
            count_cell(progress)
    return measured


def _row(
    options: argparse.Namespace, index: int, tokens: int, ranks: list[list[Measured]]
) -> Row:
    cell = [rank[index] for rank in ranks]
    middle = {
        way: statistics.median(
            max(step)
            for step in zip(*(measured.seconds[way] for measured in cell), strict=True)
        )
        for way in WAYS
    }
    return Row(
        world_size=options.world_size,
        dtype=options.dtype,
        layers=options.layers,
        hidden_size=options.hidden_size,
        tokens=tokens,
        sites=cell[0].sites,
        fused_sites=cell[0].fused_sites,
        **{way: round(1e3 * seconds, 3) for way, seconds in middle.items()},
        speed_up=round(middle["inductor"] / middle["fx_fusion"], 2),
    )


def table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """One line for each number of tokens."""
    return Table(
        f"milliseconds a step: Llama of {options.layers} layers, hidden size"
        f" {options.hidden_size}, {options.dtype}, {options.world_size} ranks, torch"
        f" {torch.__version__}, {threads_a_rank(options.world_size)} threads a rank,"
        f" {platform.machine()}; median of {options.rounds} steps, the slowest rank's",
        ("tokens", "sites fused", *WAYS, "inductor/fx_fusion"),
        tuple(
            (
                str(row.tokens),
                f"{row.fused_sites} of {row.sites}",
                *(f"{getattr(row, way):.2f}" for way in WAYS),
                f"{row.speed_up:.2f}x",
            )
            for row in rows
        ),
    )


def cannot(options: argparse.Namespace) -> str:
    """Why it can't run here, or with these options."""
    if importlib.util.find_spec("transformers") is None:
        return 'the model is transformers\'s: pip install "fx-fusion[hf]"'
    if options.hidden_size % (HEAD_SIZE * options.world_size):
        return (
            f"--hidden-size {options.hidden_size} must be a multiple of {HEAD_SIZE} (the head"
            f" size) times the {options.world_size} ranks."
        )
    return ""


BENCH: Final = Bench(
    name="cpu-step",
    module="cpu_step",
    summary="A whole step of a Llama-shaped model on CPU: eager, Inductor, fx_fusion.",
    add_options=add_options,
    cells=lambda options: len(options.tokens),
    run=run,
    table=table,
    cannot=cannot,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; see `--help` for the options."""
    return common.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())

"""The CPU kernel against what a user has without it, side by side in one run.

    python -m fx_fusion.bench.cpu --world-size 2 --csv cpu.csv

Four ways through one site (all_reduce + residual add + RMSNorm), each as a compiled function:

* fused: our kernel over shared memory;
* inductor: the group's own all_reduce over gloo, add and norm compiled by Inductor;
* eager: the same, uncompiled;
* transport: our own all_reduce over shared memory, then add and norm compiled by Inductor.
  What fused gains over it comes from fusing, the rest from the transport.

The ways take turns, round by round, so that what else the machine does falls on all alike. A
figure is the median over rounds of the mean time of a call in the round, the slowest rank's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fx_fusion.bench import common
from fx_fusion.bench.common import (
    Bench,
    Table,
    add_dtype,
    add_number,
    add_sizes,
    count_cell,
)
from fx_fusion.testing import spawn

WAYS: Final = ("fused", "inductor", "eager", "transport")
TOKENS: Final = (1, 8, 64, 512)
HIDDEN_SIZES: Final = (2880, 4096, 8192)
#: What a round is meant to take, in seconds, for each way.
ROUND_SECONDS: Final = 0.02
_Site = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """One cell: the time of a call in microseconds for each way, and the spread of fused.

    `fused_low` and `fused_high` are the quartiles over rounds; `speed_up` is inductor / fused.
    """

    world_size: int
    dtype: str
    tokens: int
    hidden: int
    fused: float
    inductor: float
    eager: float
    transport: float
    fused_low: float
    fused_high: float
    speed_up: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    add_number(parser, "--world-size", 2, "ranks")
    add_dtype(parser)
    add_sizes(parser, tokens=TOKENS, hidden_sizes=HIDDEN_SIZES)
    add_number(parser, "--rounds", 15, "rounds a cell", least=2)


def cells_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """The cells of a run: tokens and hidden size."""
    return [(tokens, hidden) for hidden in options.hidden_size for tokens in options.tokens]


def run(options: argparse.Namespace, progress: str = "") -> list[Row]:
    """Measure every cell on real ranks."""
    cells = cells_of(options)
    results = spawn(
        measure,
        options.world_size,
        timeout=60 + 60 * len(cells),
        args=(cells, options.dtype, options.rounds, progress),
    )
    return [
        _row(options.world_size, options.dtype, cell, [result[index] for result in results])
        for index, cell in enumerate(cells)
    ]


def measure(
    rank: int,
    world_size: int,
    cells: list[tuple[int, int]],
    dtype: str,
    rounds: int,
    progress: str = "",
) -> list[dict[str, list[float]]]:
    """On one rank: for each cell and way, the mean microseconds of a call in each round."""
    torch.set_num_threads(threads_a_rank(world_size))
    keep_freed_memory()
    measured = []
    for tokens, hidden in cells:
        torch._dynamo.reset()
        shape = (tokens, hidden)
        generator = torch.Generator().manual_seed(rank)
        x, residual = (
            torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in range(2)
        )
        weight = torch.ones(hidden, dtype=x.dtype)
        ways = _ways(hidden, world_size)
        with torch.no_grad():
            measured.append(_rounds(ways, (x, residual, weight), rounds))
        if rank == 0:
            count_cell(progress)
    return measured


def threads_a_rank(world_size: int) -> int:
    """Each rank's share of the cores: more would make every way wait for the scheduler."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, for all ways alike.

    A loop over one site frees the top of the heap at every call, and glibc gives it back from
    about 1 MiB on: then hundreds of page faults a call are timed, or none, by luck. Within a
    model's step the top of the heap stays in use.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        c_library = ctypes.CDLL(None)
        for which in (trim_threshold, mmap_threshold):
            c_library.mallopt(which, 1 << 30)


def _ways(hidden: int, world_size: int) -> dict[str, _Site]:
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    assert group is not None

    def add_norm(
        reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        h = residual + reduced
        return torch.nn.functional.rms_norm(h, (hidden,), weight, 1e-6), h

    def site(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        reduced = cast(Any, funcol).all_reduce(x, "sum", group)
        return add_norm(reduced, residual, weight)

    from fx_fusion.ops import all_reduce_add_rms_norm as op

    def transport(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        _, _, reduced, _ = op(
            x,
            None,
            None,
            None,
            1e-6,
            group.group_name,
            world_size,
            weight_form="none",
            want_norm=False,
            want_reduced=True,
        )
        return add_norm(reduced, residual, weight)

    return {
        "fused": torch.compile(site, backend="fx_fusion"),
        "inductor": torch.compile(site, backend="inductor"),
        "eager": site,
        "transport": torch.compile(transport, backend="fx_fusion"),
    }


def _rounds(
    ways: dict[str, _Site], inputs: tuple[torch.Tensor, ...], rounds: int
) -> dict[str, list[float]]:
    calls = {}
    for name, way in ways.items():
        for _ in range(3):
            way(*inputs)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(5):
            way(*inputs)
        once = torch.tensor((time.perf_counter() - start) / 5)
        dist.all_reduce(once, dist.ReduceOp.MAX)  # the same number of calls on all ranks
        calls[name] = max(3, min(500, int(ROUND_SECONDS / float(once))))
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls[name]):
                way(*inputs)
            seen[name].append((time.perf_counter() - start) / calls[name] * 1e6)
    return seen


def _row(
    world_size: int, dtype: str, cell: tuple[int, int], ranks: list[dict[str, list[float]]]
) -> Row:
    slowest = {
        name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in WAYS
    }
    middle = {name: statistics.median(values) for name, values in slowest.items()}
    low, _, high = statistics.quantiles(slowest["fused"], n=4)
    return Row(
        world_size,
        dtype,
        *cell,
        **{name: round(value, 1) for name, value in middle.items()},
        fused_low=round(low, 1),
        fused_high=round(high, 1),
        speed_up=round(middle["inductor"] / middle["fused"], 2),
    )


def table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """One line for each cell."""
    return Table(
        f"microseconds a call, {options.world_size} ranks, {options.dtype}, torch"
        f" {torch.__version__}, {threads_a_rank(options.world_size)} threads a rank,"
        f" {platform.machine()} with {len(os.sched_getaffinity(0))} cores;"
        f" median of {options.rounds} rounds, the slowest rank's",
        ("tokens", "hidden", *WAYS, "fused quartiles", "inductor/fused"),
        tuple(
            (
                str(row.tokens),
                str(row.hidden),
                *(f"{getattr(row, name):.1f}" for name in WAYS),
                f"{row.fused_low:.1f} .. {row.fused_high:.1f}",
                f"{row.speed_up:.2f}x",
            )
            for row in rows
        ),
    )


BENCH: Final = Bench(
    name="cpu",
    module="cpu",
    summary="One site on CPU: our kernel beside Inductor and eager over gloo.",
    add_options=add_options,
    cells=lambda options: len(cells_of(options)),
    run=run,
    table=table,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; see `--help` for the options."""
    return common.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())

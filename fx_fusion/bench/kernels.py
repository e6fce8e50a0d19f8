"""Time the fused op against unfused candidates, in CUDA graphs, on real ranks.

    python -m fx_fusion.bench.kernels --world-size 2 --csv kernels.csv

Every candidate of a cell is captured as a graph of 20 ops, each with its own input and the
residual of the one before; the graphs are replayed in turn, so that all see the same machine.
A round's figure is the time of one replay divided by 20, the maximum over ranks; a cell shows
the median over rounds and the spread (quartiles). The L2 cache is warm.

Candidates:

* fx_fusion: this package's kernel.
* unfused copy: x copied into symmetric memory, torch's `symm_mem.one_shot_all_reduce`, then add
  and RMSNorm as Inductor compiles them.
* unfused: the same with x already in symmetric memory.
* nccl: `all_reduce` of NCCL, then the same compiled code; only where each rank has a GPU.

Ranks that share one GPU, under MPS or in turns, have no link between them: such figures are for
regressions, they say nothing about NVLink, and the output says so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fx_fusion import prepare
from fx_fusion.bench import common
from fx_fusion.bench.common import (
    Bench,
    Table,
    add_dtype,
    add_number,
    add_sizes,
    count_cell,
)
from fx_fusion.lowering.select import digest_of
from fx_fusion.ops import all_reduce_add_rms_norm
from fx_fusion.settings import FusionSettings
from fx_fusion.testing import spawn

OPS: Final = 20
TOKENS: Final = (1, 8, 16, 32, 64, 128, 256)
HIDDEN_SIZES: Final = (2880, 4096, 5120, 7168, 8192)
_EPS: Final = 1e-6
_Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Cell:
    """One candidate at one size; microseconds per op."""

    candidate: str
    world_size: int
    tokens: int
    hidden_size: int
    dtype: str
    median: float
    low: float
    high: float


def add_rms_norm(
    reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows the all_reduce in a model, for Inductor to compile."""
    hidden = reduced + residual
    hidden32 = hidden.float()
    normed = hidden32 * torch.rsqrt(hidden32.pow(2).mean(-1, keepdim=True) + _EPS)
    return weight * normed.to(hidden.dtype), hidden


def candidates(
    tokens: int, hidden_size: int, dtype: torch.dtype, group: dist.ProcessGroup
) -> dict[str, _Step]:
    """Each candidate as a function from (x, residual, weight) to (norm, new residual)."""
    import torch.distributed._symmetric_memory as symmetric_memory

    name, size = str(group.group_name), group.size()
    plan = digest_of(FusionSettings(kernel="fx_fusion"))
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compile(
        add_rms_norm, dynamic=False
    )

    def fused(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, hidden, _, _ = all_reduce_add_rms_norm(
            x,
            residual,
            weight,
            None,
            _EPS,
            name,
            size,
            norm_dtype=dtype,
            want_residual=True,
            plan=plan,
        )
        return norm, hidden

    found: dict[str, _Step] = {"fx_fusion": fused}
    # Ranks that share a GPU can't load a kernel while the kernel of another waits for them.
    prepare(group, max_tokens=tokens, hidden_size=hidden_size, dtype=dtype)
    sample = torch.zeros(tokens, hidden_size, dtype=dtype, device="cuda")
    compiled(sample, sample, sample[0])
    torch.cuda.synchronize()
    dist.barrier(group)
    if dtype != torch.float16:  # torch's op has no fp16
        shared: torch.Tensor = cast(Any, symmetric_memory).empty(
            tokens, hidden_size, dtype=dtype, device="cuda"
        )
        cast(Any, symmetric_memory).rendezvous(shared, name)
        one_shot = torch.ops.symm_mem.one_shot_all_reduce

        def unfused_copy(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            shared.copy_(x)
            return compiled(one_shot(shared, "sum", name), residual, weight)

        def unfused(
            _: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return compiled(one_shot(shared, "sum", name), residual, weight)

        found |= {"unfused copy": unfused_copy, "unfused": unfused}
    if "nccl" in str(cast(Any, dist).get_backend(group)):

        def nccl(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            reduced = x.clone()
            dist.all_reduce(reduced, group=group)
            return compiled(reduced, residual, weight)

        found["nccl"] = nccl
    return found


def captured(
    step: _Step, inputs: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor
) -> torch.cuda.CUDAGraph:
    """A graph of OPS ops; the step is compiled and warmed up first."""
    stream = cast(Any, torch.cuda).Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def run() -> None:
        hidden = residual
        for x in inputs:
            _, hidden = step(x, hidden, weight)

    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_cell(
    tokens: int, hidden_size: int, dtype: torch.dtype, rounds: int
) -> dict[str, list[float]]:
    """Microseconds per op of every candidate, one figure a round, on this rank."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator(device="cuda").manual_seed(group.rank())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    inputs = [random(tokens, hidden_size) for _ in range(OPS)]
    residual, weight = random(tokens, hidden_size), random(hidden_size)
    graphs = {
        name: captured(step, inputs, residual, weight)
        for name, step in candidates(tokens, hidden_size, dtype, group).items()
    }
    timing: Any = torch.cuda
    events = [timing.Event(enable_timing=True) for _ in range(2)]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds + 2):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            dist.barrier()
            graph.replay()  # brings the ranks into step
            events[0].record()
            graph.replay()
            events[1].record()
            torch.cuda.synchronize()
            if number >= 2:
                times[name].append(events[0].elapsed_time(events[1]) * 1000 / OPS)
    return times


def rank_job(
    rank: int,
    world_size: int,
    sizes: Sequence[tuple[int, int]],
    dtype_name: str,
    rounds: int,
    progress: str = "",
) -> list[Cell]:
    """Time every size on this rank; rank 0 returns the cells, the maximum over ranks."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    cells = []
    for tokens, hidden_size in sizes:
        times = time_cell(tokens, hidden_size, dtype, rounds)
        for name, own in times.items():
            gathered: list[Any] = [None] * world_size
            cast(Any, dist).all_gather_object(gathered, own)
            slowest = [max(column) for column in zip(*gathered, strict=True)]
            low, median, high = statistics.quantiles(slowest, n=4)
            cells.append(
                Cell(
                    name,
                    world_size,
                    tokens,
                    hidden_size,
                    dtype_name,
                    round(median, 2),
                    round(low, 2),
                    round(high, 2),
                )
            )
        torch._dynamo.reset()
        if rank == 0:
            count_cell(progress)
    return cells if rank == 0 else []


def table(cells: Sequence[Cell], options: argparse.Namespace) -> Table:
    """One line for each size: the medians, and how often faster fx_fusion is than each other."""
    names = list(dict.fromkeys(cell.candidate for cell in cells))
    lines = []
    for (tokens, hidden_size), group in itertools.groupby(
        cells, key=lambda cell: (cell.tokens, cell.hidden_size)
    ):
        by_name = {cell.candidate: cell for cell in group}
        ours = by_name["fx_fusion"].median
        texts = []
        for name in names:
            cell = by_name[name]
            ratio = "" if name == "fx_fusion" else f" {cell.median / ours:.2f}x"
            texts.append(f"{cell.median:.2f} ({cell.low:.1f}-{cell.high:.1f}){ratio}")
        lines.append((str(tokens), str(hidden_size), *texts))
    shared = torch.cuda.device_count() < options.world_size
    return Table(
        f"world size {options.world_size}, {options.dtype}, us per op: median (quartiles) of"
        f" {options.rounds} replays of a graph of {OPS} ops, maximum over ranks, L2 warm",
        ("tokens", "hidden", *names),
        tuple(lines),
        f"The ranks share {torch.cuda.device_count()} GPU(s) {_sharing()}: figures for"
        " regressions, not for a machine with a GPU each."
        if shared
        else "",
    )


def _sharing() -> str:
    return "under MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "in turns"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    add_number(parser, "--world-size", 2, "ranks")
    add_dtype(parser)
    add_sizes(parser, tokens=TOKENS, hidden_sizes=HIDDEN_SIZES)
    add_number(parser, "--rounds", 15, "replays a cell", least=2)
    add_number(parser, "--timeout", 300, "seconds for everything")


def sizes_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """The sizes of a run: tokens and hidden size."""
    return list(itertools.product(options.tokens, options.hidden_size))


def run(options: argparse.Namespace, progress: str = "") -> list[Cell]:
    """Measure every size on real ranks."""
    # Ranks that share a GPU can't load a kernel while the kernel of another waits for them;
    # this is for torch's own kernels.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    cells: list[Cell] = spawn(
        rank_job,
        options.world_size,
        device="cuda",
        timeout=options.timeout,
        args=(sizes_of(options), options.dtype, options.rounds, progress),
    )[0]
    return cells


def cannot(_: argparse.Namespace) -> str:
    """Why it can't run here."""
    return "" if torch.cuda.device_count() else "this benchmark needs a GPU; torch sees none."


def machine() -> str:
    """The GPUs' name and number."""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, shared {_sharing()}"


BENCH: Final = Bench(
    name="kernels",
    module="kernels",
    summary="The GPU kernel beside unfused candidates, in CUDA graphs.",
    add_options=add_options,
    cells=lambda options: len(sizes_of(options)),
    run=run,
    table=table,
    cannot=cannot,
    machine=machine,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; see `--help` for the options."""
    return common.main(BENCH, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Time the fused op against unfused candidates and FlashInfer, in CUDA graphs, on real ranks.

    python -m fx_fusion.bench.kernels --world-size 2 --csv kernels.csv

Every candidate of a cell is captured as a graph of 20 ops, each with its own input and the
residual of the one before. Its results are compared with the sum in rank order; a candidate that
is wrong, or can't run, is named with its cause and not timed. The graphs are replayed in turn,
so that all see the same machine. A round's figure is the time of one replay divided by 20, the
maximum over ranks; a cell shows the median over rounds and the spread (quartiles). The L2 cache
is warm.

Candidates:

* fx_fusion: this package's kernel.
* own all_reduce: its kernel as an all_reduce alone, then add and RMSNorm as Inductor compiles
  them. What fx_fusion gains over it comes from fusing, the rest from the protocol.
* flashinfer one-shot, two-shot, each with programmatic launch (pdl) and without, where
  FlashInfer is installed. The table shows the best of them.
* unfused copy: x copied into symmetric memory, torch's `symm_mem.one_shot_all_reduce`, then the
  compiled add and RMSNorm.
* unfused: the same with x already in symmetric memory.
* unfused one kernel: `one_shot_all_reduce_copy`, which copies x itself.
* unfused two-shot: x copied, `two_shot_all_reduce`.
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
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from fx_fusion.bench import common
from fx_fusion.bench import kernel_flashinfer as flashinfer
from fx_fusion.bench.common import Bench, Table, add_dtype, add_number, add_sizes
from fx_fusion.bench.kernel_candidates import NAMES, OURS, UNFUSED
from fx_fusion.bench.kernel_times import OPS, Cell, Job, rank_job
from fx_fusion.testing import spawn

TOKENS: Final = (1, 8, 16, 32, 64, 128, 256)
HIDDEN_SIZES: Final = (2880, 4096, 5120, 7168, 8192)
#: The table's name of the fastest variant.
_FLASHINFER: Final = "flashinfer"


def shown_cells(cells: Sequence[Cell]) -> dict[str, Cell]:
    """The cells of one size by the table's column: the best of FlashInfer's variants is one."""
    measured = {cell.candidate: cell for cell in cells if not cell.cause}
    variants = [measured.pop(name) for name in flashinfer.VARIANTS if name in measured]
    if variants:
        measured[_FLASHINFER] = min(variants, key=lambda cell: cell.median)
    return measured


def table(cells: Sequence[Cell], options: argparse.Namespace) -> Table:
    """One line for each size: the medians, and how often faster fx_fusion is than each other."""
    order = [name for name in NAMES if name not in flashinfer.VARIANTS]
    order.insert(1, _FLASHINFER)
    sizes = [
        (size, shown_cells(list(group)))
        for size, group in itertools.groupby(
            cells, key=lambda cell: (cell.tokens, cell.hidden_size)
        )
    ]
    names = [name for name in order if any(name in shown for _, shown in sizes)]
    lines = []
    ratios: dict[str, dict[str, float]] = {_FLASHINFER: {}, "unfused": {}}
    for (tokens, hidden_size), shown in sizes:
        ours = shown[OURS].median if OURS in shown else float("nan")
        texts = []
        for name in names:
            if name not in shown:
                texts.append("-")
                continue
            cell = shown[name]
            ratio = "" if name == OURS else f" {cell.median / ours:.2f}x"
            texts.append(f"{cell.median:.2f} ({cell.low:.1f}-{cell.high:.1f}){ratio}")
        lines.append((str(tokens), str(hidden_size), *texts))
        unfused = [shown[name].median for name in UNFUSED if name in shown]
        for name, others in (
            (_FLASHINFER, [shown[_FLASHINFER].median] if _FLASHINFER in shown else []),
            ("unfused", unfused),
        ):
            if others and OURS in shown:
                ratios[name][f"{tokens}x{hidden_size}"] = min(others) / ours
    notes = [
        f"Best {name} / {OURS}: geometric mean {statistics.geometric_mean(found.values()):.2f},"
        f" worst cell {found[worst]:.2f} ({worst})."
        for name, found in ratios.items()
        if found
        for worst in [min(found, key=lambda size: found[size])]
    ]
    if torch.cuda.device_count() < options.world_size:
        notes.insert(
            0,
            f"The ranks share {torch.cuda.device_count()} GPU(s) {_sharing()}: figures for"
            " regressions, not for a machine with a GPU each.",
        )
    return Table(
        f"world size {options.world_size}, {options.dtype}, us per op: median (quartiles) of"
        f" {options.rounds} replays of a graph of {OPS} ops, maximum over ranks, L2 warm",
        ("tokens", "hidden", *names),
        tuple(lines),
        "\n".join([*notes, *left_out(cells)]),
    )


def left_out(cells: Iterable[Cell]) -> list[str]:
    """A line for each candidate and cause: where it wasn't measured, and why."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.cause:
            sizes.setdefault((cell.candidate, cell.cause), []).append(
                f"{cell.tokens}x{cell.hidden_size}"
            )
    return [
        f"Not measured: {name} at {', '.join(where)}: {cause}."
        for (name, cause), where in sizes.items()
    ]


def _sharing() -> str:
    return "under MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "in turns"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    add_number(parser, "--world-size", 2, "ranks")
    add_dtype(parser)
    add_sizes(parser, tokens=TOKENS, hidden_sizes=HIDDEN_SIZES)
    add_number(parser, "--rounds", 15, "replays a cell", least=2)
    add_number(parser, "--timeout", 300, "seconds for everything")
    parser.add_argument(
        "--candidates",
        default=",".join(NAMES),
        metavar="NAME,NAME",
        help="which to measure; a name stands for all that begin with it (default all)",
    )


def sizes_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """The sizes of a run: tokens and hidden size."""
    return list(itertools.product(options.tokens, options.hidden_size))


def chosen(given: str) -> list[str]:
    """The candidates that `--candidates` names; those a name matches only as a beginning too."""
    words = [word.strip() for word in given.split(",") if word.strip()]
    found = {
        name
        for word in words
        for name in NAMES
        if name == word or (word not in NAMES and name.startswith(word))
    }
    return [name for name in NAMES if name in found]


def run(options: argparse.Namespace, progress: str = "") -> list[Cell]:
    """Measure every size on real ranks."""
    # Ranks that share a GPU can't load a kernel while the kernel of another waits for them;
    # this is for torch's own kernels.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    names, causes = chosen(options.candidates), {}
    if variants := [name for name in names if name in flashinfer.VARIANTS]:
        cause = flashinfer.build_cause(options.timeout)
        causes = dict.fromkeys(variants, cause) if cause else {}
    job = Job(sizes_of(options), options.dtype, options.rounds, names, causes, progress)
    cells: list[Cell] = spawn(
        rank_job, options.world_size, device="cuda", timeout=options.timeout, args=(job,)
    )[0]
    return cells


def cannot(options: argparse.Namespace) -> str:
    """Why it can't run here, or with these options."""
    if not chosen(options.candidates):
        return f"--candidates {options.candidates}: choose from {', '.join(NAMES)}."
    return "" if torch.cuda.device_count() else "this benchmark needs a GPU; torch sees none."


def machine() -> str:
    """The GPUs' name and number."""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, shared {_sharing()}"


BENCH: Final = Bench(
    name="kernels",
    module="kernels",
    summary="The GPU kernel beside FlashInfer and unfused candidates, in CUDA graphs.",
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

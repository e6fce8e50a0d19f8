"""Time the fused op against unfused candidates and FlashInfer, in CUDA graphs, on real ranks.

    python -m fx_fusion.bench.kernels --world-size 2 --csv kernels.csv

Every candidate of a cell is captured as a graph of 20 ops (4 beyond 256 tokens), each with its
own input and the residual of the one before. Its results are compared with the sum in rank order,
bit by bit or within what rounding can explain; a candidate that is wrong, or can't run, is named
with its cause and not timed. The graphs are replayed in turn, so that all see the same machine. A
round's figure is the time of one replay divided by its ops, the maximum over ranks; a cell shows
the median over rounds and the spread (quartiles). The L2 cache is warm.

Candidates:

* fx_fusion: this package's kernel, the algorithm being what `select` chose beforehand.
* fx_fusion one-shot, fx_fusion two-shot: one algorithm at every size.
* fx_fusion auto, fx_fusion unfused: the op with that setting of `kernel`; where it means the group's
  own all_reduce, then add and norm as the op's unfused path runs them. With NCCL only.
* Triton: the same kernel as it is written in Triton; only if it is asked for.
* own all_reduce: its kernel as an all_reduce alone, then add and RMSNorm as Inductor compiles
  them. What fx_fusion gains over it comes from fusing, the rest from the protocol.
* flashinfer one-shot, two-shot, each with programmatic launch (pdl) and without, where
  FlashInfer is installed. The table shows the best of them. With pdl, releases before 0.7.1 read
  the residual too early if the kernel ahead writes it, so there every op has the first residual.
  A variant that is wrong is timed all the same, and the output says so.
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
import functools
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Final

import torch

from fx_fusion.bench import common
from fx_fusion.bench import kernel_flashinfer as flashinfer
from fx_fusion.bench.common import Bench, add_dtype, add_number, add_sizes
from fx_fusion.bench.kernel_candidates import NAMES, TRITON
from fx_fusion.bench.kernel_cells import Cell, cells_of, pooled, write_rows
from fx_fusion.bench.kernel_runs import daemon_cause, measured_runs
from fx_fusion.bench.kernel_table import table
from fx_fusion.bench.kernel_times import Job

TOKENS: Final = (1, 8, 16, 32, 64, 128, 256)
HIDDEN_SIZES: Final = (2880, 4096, 5120, 7168, 8192)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    add_number(parser, "--world-size", 2, "ranks")
    add_dtype(parser)
    add_sizes(parser, tokens=TOKENS, hidden_sizes=HIDDEN_SIZES)
    add_number(parser, "--rounds", 15, "replays a cell", least=7)
    add_number(parser, "--timeout", 300, "seconds for a run of all sizes")
    add_number(
        parser,
        "--daemons",
        0,
        "where ranks share a GPU: runs of all sizes, each under an MPS daemon of its own; 0 for one"
        " as the environment is",
        least=0,
    )
    parser.add_argument(
        "--in-model",
        action="store_true",
        help="time the op between GEMMs too, with a warm and a cold L2: what it adds to them",
    )
    parser.add_argument(
        "--candidates",
        default=",".join(name for name in NAMES if name != TRITON),
        metavar="NAME,NAME",
        help="which to measure; a beginning stands for all that have it (default all but Triton)",
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
    keep = None
    if options.csv is not None:  # written as sizes are done, whatever becomes of the run
        path = options.csv.absolute()
        keep = functools.partial(
            write_rows, path, options.conditions, options.dtype, options.world_size
        )
    job = Job(
        sizes_of(options),
        options.dtype,
        options.rounds,
        names,
        causes,
        options.in_model,
        progress,
        keep=keep,
    )
    runs = measured_runs(job, options.world_size, options.timeout, options.daemons)
    return [
        cell
        for measured in pooled(runs)
        for cell in cells_of(measured, options.dtype, options.world_size)
    ]


def cannot(options: argparse.Namespace) -> str:
    """Why it can't run here, or with these options."""
    if not chosen(options.candidates):
        return f"--candidates {options.candidates}: choose from {', '.join(NAMES)}."
    if not torch.cuda.device_count():
        return "this benchmark needs a GPU; torch sees none."
    return daemon_cause(options.daemons, options.world_size)


def machine() -> str:
    """The GPUs' number and name."""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


BENCH: Final = Bench(
    name="kernels",
    module="kernels",
    summary="The GPU kernel beside FlashInfer and unfused candidates, in CUDA graphs.",
    add_options=add_options,
    cells=lambda options: len(sizes_of(options)) * (options.daemons or 1),
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

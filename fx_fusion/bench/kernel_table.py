"""The table of the kernels benchmark, and the summary below its title."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from fx_fusion.bench import kernel_flashinfer as flashinfer
from fx_fusion.bench.common import Table
from fx_fusion.bench.kernel_candidates import NAMES, OURS, UNFUSED
from fx_fusion.bench.kernel_cells import Cell
from fx_fusion.bench.kernel_graphs import ALONE

#: The table's name of the fastest variant.
FLASHINFER: Final = "flashinfer"
#: Up to how many tokens a figure of the summary goes; the next one is of the cells beyond.
FEW_TOKENS: Final = 64


class Line(NamedTuple):
    """The cells of one line of the table, by column."""

    between: str
    tokens: int
    hidden_size: int
    cells: Mapping[str, Cell]


def lines_of(cells: Sequence[Cell]) -> list[Line]:
    """The measured cells, line by line; the best of FlashInfer's variants is one."""
    lines = []
    for (between, tokens, hidden_size), group in itertools.groupby(
        cells, key=lambda cell: (cell.between, cell.tokens, cell.hidden_size)
    ):
        measured = {cell.candidate: cell for cell in group if not math.isnan(cell.median)}
        variants = [measured.pop(name) for name in flashinfer.VARIANTS if name in measured]
        if variants:
            measured[FLASHINFER] = min(variants, key=lambda cell: cell.median)
        lines.append(Line(between, tokens, hidden_size, measured))
    return lines


def table(cells: Sequence[Cell], options: argparse.Namespace) -> Table:
    """One line for each size: the medians, and how often faster fx_fusion is than each other."""
    lines = lines_of(cells)
    order = [name for name in NAMES if name not in flashinfer.VARIANTS]
    order.insert(order.index(OURS) + 1, FLASHINFER)
    names = [name for name in order if any(name in line.cells for line in lines)]
    notes = [*summary(lines), *remarks(cells)]
    if torch.cuda.device_count() < options.world_size:
        notes.insert(
            0,
            f"The ranks share {torch.cuda.device_count()} GPU(s) {_sharing(options)}: figures for"
            " regressions, not for a machine with a GPU each.",
        )
    with_gemms = any(line.between != ALONE for line in lines)
    return Table(
        f"world size {options.world_size}, {options.dtype}, us per op: median (quartiles) of"
        f" {options.rounds * (options.daemons or 1)} replays of a graph of {_ops(cells)} ops, maximum over ranks, L2 warm",
        (*(["between ops"] if with_gemms else []), "tokens", "hidden", *names),
        tuple(
            (
                *([line.between] if with_gemms else []),
                str(line.tokens),
                str(line.hidden_size),
                *(_text(line, name) for name in names),
            )
            for line in lines
        ),
        "\n".join(notes),
    )


def _ops(cells: Sequence[Cell]) -> str:
    return " or ".join(str(ops) for ops in sorted({cell.ops for cell in cells}, reverse=True))


def _text(line: Line, name: str) -> str:
    cell = line.cells.get(name)
    if cell is None:
        return "-"
    ratio = ""
    if name != OURS and OURS in line.cells and line.cells[OURS].median > 0:
        ratio = f" {cell.median / line.cells[OURS].median:.2f}x"
    return f"{cell.median:.2f} ({cell.low:.1f}-{cell.high:.1f}){ratio}"


def summary(lines: Iterable[Line]) -> list[str]:
    """Geometric means and worst cells, of the ops alone.

    Time over FlashInfer's best (below 1 is faster than it), and the best unfused time from an x
    that lies anywhere over ours (above 1 is faster than that), each up to `FEW_TOKENS` and beyond.
    """
    alone = [line for line in lines if line.between == ALONE and OURS in line.cells]
    notes = []
    for few in (True, False):
        over_flashinfer: dict[str, float] = {}
        speed_up: dict[str, float] = {}
        for line in alone:
            if (line.tokens <= FEW_TOKENS) != few:
                continue
            size, ours = f"{line.tokens}x{line.hidden_size}", line.cells[OURS].median
            unfused = [line.cells[name].median for name in UNFUSED if name in line.cells]
            if FLASHINFER in line.cells:
                over_flashinfer[size] = ours / line.cells[FLASHINFER].median
            if unfused:
                speed_up[size] = min(unfused) / ours
        where = f"up to {FEW_TOKENS} tokens" if few else f"more than {FEW_TOKENS} tokens"
        for what, ratios, worst in (
            (f"{OURS} / best flashinfer", over_flashinfer, max),
            (f"best unfused from any x / {OURS}", speed_up, min),
        ):
            if ratios:
                cell = worst(ratios, key=lambda size: ratios[size])
                notes.append(
                    f"{what}, {where}: geometric mean"
                    f" {statistics.geometric_mean(ratios.values()):.2f} of {len(ratios)} cells,"
                    f" worst {ratios[cell]:.2f} ({cell})."
                )
    return notes


def remarks(cells: Iterable[Cell]) -> list[str]:
    """A line for each candidate and cause: where it wasn't measured or was wrong, and why."""
    sizes: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.cause and cell.between == ALONE:
            what = "Not measured" if math.isnan(cell.median) else "Timed, but wrong"
            sizes.setdefault((what, cell.candidate, cell.cause), []).append(
                f"{cell.tokens}x{cell.hidden_size}"
            )
    return [
        f"{what}: {name} at {_some(where)}: {cause}."
        for (what, name, cause), where in sizes.items()
    ]


def _some(sizes: Sequence[str]) -> str:
    return ", ".join(sizes) if len(sizes) <= 6 else f"{len(sizes)} sizes from {sizes[0]} on"


def _sharing(options: argparse.Namespace) -> str:
    if options.daemons:
        return f"under MPS, over {options.daemons} daemons"
    return "under MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "in turns"

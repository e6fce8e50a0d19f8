"""The rows of the kernels benchmark: what was measured, pooled over runs, as medians."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fx_fusion.bench.common import write_csv
from fx_fusion.bench.kernel_candidates import NAMES, traffic
from fx_fusion.bench.kernel_graphs import ALONE, OPS, ops_of
from fx_fusion.bench.kernel_times import Measured


@dataclass(frozen=True)
class Cell:
    """One candidate at one size; microseconds per op, not a number where it wasn't measured.

    `median`, `low` and `high` are over rounds, of the slowest rank. `cause` says why the
    candidate wasn't measured there, or what was wrong with its results. `between` says what
    stands between the ops of the graph; with GEMMs, the figure is what the op adds to them.
    `link_bytes`, `hops` and `link_us` are counted, not measured (`kernel_links`); -1 if unknown.
    `ops` are those of the graph.
    """

    candidate: str
    world_size: int
    tokens: int
    hidden_size: int
    dtype: str
    median: float
    low: float
    high: float
    cause: str = ""
    between: str = ALONE
    link_bytes: int = -1
    hops: int = -1
    link_us: float = -1.0
    ops: int = OPS


def pooled(runs: Sequence[Sequence[Measured]]) -> list[Measured]:
    """Several runs of the same sizes as one, with the rounds of all; in the order of the first.

    A candidate that one run left out is left out.
    """
    together: dict[tuple[int, int, str], Measured] = {}
    for run in runs:
        for one in run:
            key = (one.tokens, one.hidden_size, one.between)
            known = together.get(key)
            if known is not None:
                times = {
                    name: [*rounds, *one.times[name]]
                    for name, rounds in known.times.items()
                    if name in one.times
                }
                one = known._replace(times=times, causes={**known.causes, **one.causes})
            together[key] = one
    return list(together.values())


def cells_of(measured: Measured, dtype: str, world_size: int) -> list[Cell]:
    """The cells of one size."""
    tokens, hidden_size, between, times, causes = measured
    row_bytes = hidden_size * getattr(torch, dtype).itemsize
    cells = []
    for name in NAMES:
        cause = causes.get(name, "")
        if name in times:
            figures = quartiles(times[name])
        elif cause and between == ALONE:
            figures = (math.nan, math.nan, math.nan)
        else:
            continue
        sent = traffic(name, tokens, row_bytes, world_size)
        counted = (-1, -1, -1.0)
        if sent is not None:
            counted = (sent.sent, sent.hops, round(sent.microseconds, 3))
        at = (world_size, tokens, hidden_size, dtype)
        cells.append(Cell(name, *at, *figures, cause, between, *counted, ops_of(tokens)))
    return cells


def write_rows(
    path: Path,
    given: Mapping[str, str],
    dtype: str,
    world_size: int,
    found: Sequence[Measured],
) -> None:
    """Write what a run has so far as its CSV file, whole or not at all."""
    rows = [cell for measured in found for cell in cells_of(measured, dtype, world_size)]
    if rows:
        part = path.with_name(f"{path.name}.part")
        write_csv(part, rows, given)
        part.replace(path)


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the lower and the upper quartile."""
    low, median, high = statistics.quantiles(times, n=4)
    return round(median, 2), round(low, 2), round(high, 2)

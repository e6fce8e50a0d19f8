"""What a fused site was measured to save, for estimates on a machine that can't measure it.

`sites.csv` holds one line for each cell that was measured, in microseconds a call, with the machine,
the date and the command. Nothing is computed between or beyond the cells: `lookup` takes the nearest
one and says how far away it is, or says that there is none.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

#: A hidden size further than this factor from the nearest measured one gets no estimate.
HIDDEN_SIZE_FACTOR: Final = 2.0
#: The same for tokens, which were measured in wide steps; beyond the largest there is none.
TOKENS_FACTOR: Final = 4.0

_FILE: Final = Path(__file__).with_name("sites.csv")


@dataclass(frozen=True)
class Cell:
    """One measured cell: all_reduce, residual add and RMSNorm, fused and as Inductor compiles them.

    Attributes:
        arch: "cpu"; with `world_size`, `dtype`, `hidden_size` and `tokens` what was measured.
        world_size: Ranks in the group.
        dtype: The reduced tensor's dtype, "bfloat16".
        hidden_size: Elements of the last dimension.
        tokens: Rows.
        fused: Microseconds a call of the fused op.
        unfused: Microseconds a call of the same function compiled by Inductor alone; on GPUs
            over NCCL, and both in CUDA graphs.
        machine: What it was measured on; `cores` how many cores all ranks shared.
        cores: See `machine`.
        torch: torch's version.
        date: YYYY-MM-DD.
        command: The command that measured it.
    """

    arch: str
    world_size: int
    dtype: str
    hidden_size: int
    tokens: int
    fused: float
    unfused: float
    machine: str
    cores: int
    torch: str
    date: str
    command: str

    @property
    def saved(self) -> float:
        """Microseconds saved a call."""
        return self.unfused - self.fused

    @property
    def conditions(self) -> str:
        """Where and when it was measured, in words."""
        how = f"{self.cores} core{'' if self.cores == 1 else 's'} shared by {self.world_size} ranks"
        if self.arch != "cpu":
            how = f"{self.world_size} ranks, CUDA graphs, over NCCL"
        return f"{self.machine}, {how}, torch {self.torch}, {self.date}"


@dataclass(frozen=True)
class Found:
    """The answer of `lookup`.

    Attributes:
        cell: The nearest measured cell, or None.
        note: How it differs from what was asked, "" if it doesn't; without a cell, why there is none.
    """

    cell: Cell | None
    note: str = ""


@cache
def cells() -> tuple[Cell, ...]:
    """Everything that was measured."""
    with _FILE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Cell(
                arch=row["arch"],
                world_size=int(row["world_size"]),
                dtype=row["dtype"],
                hidden_size=int(row["hidden_size"]),
                tokens=int(row["tokens"]),
                fused=float(row["fused"]),
                unfused=float(row["unfused"]),
                machine=row["machine"],
                cores=int(row["cores"]),
                torch=row["torch"],
                date=row["date"],
                command=row["command"],
            )
            for row in csv.DictReader(file)
        )


def lookup(
    arch: str,
    world_size: int,
    dtype: str,
    hidden_size: int,
    tokens: int,
    table: Sequence[Cell] | None = None,
) -> Found:
    """The measured cell nearest to a site, or why there is none.

    Architecture, world size and dtype must be those measured; hidden size and tokens may be near.

    Args:
        arch: "cpu", "sm_90", "gfx942".
        world_size: Ranks in the group.
        dtype: The name of the reduced tensor's dtype.
        hidden_size: Elements of the last dimension.
        tokens: Rows.
        table: What to look in, `cells()` by default.
    """
    left = list(cells() if table is None else table)
    left = [cell for cell in left if cell.arch == arch]
    if not left:
        return Found(None, f"nothing was measured for {arch}")
    sizes = sorted({cell.world_size for cell in left})
    left = [cell for cell in left if cell.world_size == world_size]
    if not left:
        return Found(
            None, f"{arch} was measured with {_list(sizes)} ranks, not with {world_size}"
        )
    dtypes = sorted({cell.dtype for cell in left})
    left = [cell for cell in left if cell.dtype == dtype]
    if not left:
        where = f"{arch} with {world_size} ranks"
        return Found(None, f"{where} was measured in {', '.join(dtypes)}, not in {dtype}")
    near_size = _nearest({cell.hidden_size for cell in left}, hidden_size)
    if _factor(near_size, hidden_size) > HIDDEN_SIZE_FACTOR:
        return Found(
            None, f"hidden size {hidden_size} is too far from {near_size}, the nearest measured"
        )
    left = [cell for cell in left if cell.hidden_size == near_size]
    counts = {cell.tokens for cell in left}
    near_count = _nearest(counts, tokens)
    if tokens > max(counts) or _factor(near_count, tokens) > TOKENS_FACTOR:
        return Found(
            None,
            f"{tokens} tokens are outside of what was measured, {min(counts)} to {max(counts)}",
        )
    notes = []
    if near_size != hidden_size:
        notes.append(f"hidden size {near_size} for {hidden_size}")
    if near_count != tokens:
        notes.append(f"{near_count} tokens for {tokens}")
    (cell,) = (cell for cell in left if cell.tokens == near_count)
    return Found(cell, ", ".join(notes))


def _nearest(measured: set[int], asked: int) -> int:
    """By ratio; of two equally near ones the smaller."""
    return min(sorted(measured), key=lambda value: _factor(value, asked))


def _factor(one: int, other: int) -> float:
    return math.inf if min(one, other) < 1 else max(one, other) / min(one, other)


def _list(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"

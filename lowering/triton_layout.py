"""Sizes of the Triton kernel's shared memory and of its tiles: pure functions, equal on all ranks.

A row is one tile, its width a power of two. Rows go by size class: 8, 16, 32 or 64 KiB, each
with a ring, flags and states of its own, laid out as [slot][source][row][bytes], where a rank
keeps no place for its own data. A call with more rows than the ring streams through it in
chunks. So the size depends on the number of ranks alone:

    world size     2     3, 4     5 to 8        9 to 16
    MiB per rank  16   32, 48    32 to 56    32 to 60
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from fx_fusion.lowering.gpu_layout import MAX_WORLD_SIZE

#: Receive slots that take turns.
SLOTS: Final = 2
#: Bytes of a row in each size class; the largest is 16384 elements of 4 bytes.
ROW_BYTES: Final = (8192, 16384, 32768, 65536)
#: Bytes kept for the control word.
CONTROL_BYTES: Final = 256
_ELEMENTS_PER_THREAD: Final = 8
_MAX_WARPS: Final = 16


class Region(NamedTuple):
    """One size class; offsets are bytes from the start of a rank's memory.

    Attributes:
        row_bytes: From row to row.
        rows: Of the ring, in each slot from each source.
        data: Offset of the ring.
        flags: Offset of the flags, int32 [slot][row][16].
        states: Offset of the rows' states, int32 [row].
    """

    row_bytes: int
    rows: int
    data: int
    flags: int
    states: int


class Layout(NamedTuple):
    """A rank's memory.

    Attributes:
        regions: By bytes of a row.
        control: Offset of the control word.
        total: Bytes in all.
    """

    regions: dict[int, Region]
    control: int
    total: int


def ring_bytes(world_size: int) -> int:
    """Bytes of a size class' ring, in each slot from each source."""
    return (2 << 20) if world_size <= 4 else (1 << 20) if world_size <= 8 else (1 << 19)


@lru_cache
def layout(world_size: int) -> Layout:
    """The shared memory of one rank of a group."""
    ring = ring_bytes(world_size)
    flags = len(ROW_BYTES) * SLOTS * (world_size - 1) * ring
    data, regions = 0, {}
    states = flags + sum(SLOTS * (ring // row) * MAX_WORLD_SIZE * 4 for row in ROW_BYTES)
    for row in ROW_BYTES:
        rows = ring // row
        regions[row] = Region(row, rows, data, flags, states)
        data += SLOTS * (world_size - 1) * ring
        flags += SLOTS * rows * MAX_WORLD_SIZE * 4
        states += rows * 4
    control = -(-states // CONTROL_BYTES) * CONTROL_BYTES
    return Layout(regions, control, control + CONTROL_BYTES)


def block_of(hidden_size: int) -> int:
    """Elements of a row's tile: the next power of two, at least 64."""
    return max(64, 1 << (hidden_size - 1).bit_length())


def warps_of(hidden_size: int) -> int:
    """Warps of a program: a thread has 8 elements of a row, or more in the longest rows."""
    return min(_MAX_WARPS, max(1, block_of(hidden_size) // (32 * _ELEMENTS_PER_THREAD)))


def parts_at_once(hidden_size: int) -> int:
    """How many ranks' parts of a row a thread holds at once: fewer in longer rows."""
    elements = block_of(hidden_size) // (32 * warps_of(hidden_size))
    return 4 if elements <= _ELEMENTS_PER_THREAD else 2


def region_of(hidden_size: int, element_size: int, world_size: int) -> Region:
    """The size class of a row."""
    needed = block_of(hidden_size) * element_size
    regions = layout(world_size).regions
    return regions[min(row for row in ROW_BYTES if row >= needed)]

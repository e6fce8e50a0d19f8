"""Sizes of the GPU workspace and the shape of a launch: pure functions, the same on every rank.

The workspace of a rank is a receive buffer for each element width (2 and 4 bytes), laid out as
[slot][source][segment][SEGMENT_BYTES], then the state of each segment and a control word. A row
takes whole segments; a call with more rows than the ring has segments streams through it in
chunks. So the size depends on the number of ranks alone:

    world size     2      3, 4     5 to 8        9 to 16
    MiB per rank  18   36, 54    36 to 63    36 to 67.5
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

#: Bytes of a segment: 512 vectors of 16 bytes. `kSegment` of the kernel.
SEGMENT_BYTES: Final = 8192
#: Receive slots that take turns.
SLOTS: Final = 3
#: Bytes of a segment's state. `State` of the kernel.
STATE_BYTES: Final = 16
#: Bytes kept for the control word.
CONTROL_BYTES: Final = 256
VECTOR_BYTES: Final = 16
#: The longest row the kernel takes, in elements.
MAX_HIDDEN_SIZE: Final = 16384
#: The most ranks the kernel takes.
MAX_WORLD_SIZE: Final = 16
#: Threads of a block at most.
_MAX_THREADS: Final = 1024
_WARP: Final = 32


def segments(world_size: int, element_size: int) -> int:
    """Segments of the ring for elements of 2 or 4 bytes; half as many for 4 bytes."""
    count = 512 if world_size <= 4 else 256 if world_size <= 8 else 128
    return count if element_size == 2 else count // 2


class Layout(NamedTuple):
    """Byte offsets in a rank's workspace, by element size where there are two.

    Attributes:
        buffers: Of the receive buffer for 2 and for 4 bytes an element.
        states: Of the segments' states for 2 and for 4 bytes an element.
        control: Of the control word.
        total: Bytes of the workspace.
    """

    buffers: dict[int, int]
    states: dict[int, int]
    control: int
    total: int


@lru_cache
def layout(world_size: int) -> Layout:
    """The workspace of one rank of a group; a rank keeps no place for its own data."""
    offset = 0
    buffers, states = {}, {}
    for width in (2, 4):
        buffers[width] = offset
        offset += SLOTS * (world_size - 1) * segments(world_size, width) * SEGMENT_BYTES
    for width in (2, 4):
        states[width] = offset
        offset += segments(world_size, width) * STATE_BYTES
    return Layout(buffers, states, offset, offset + CONTROL_BYTES)


def takes(hidden_size: int, world_size: int) -> bool:
    """True if the kernel takes such rows and such a group."""
    return 1 <= hidden_size <= MAX_HIDDEN_SIZE and 2 <= world_size <= MAX_WORLD_SIZE


def vectors_of(hidden_size: int, element_size: int) -> int:
    """Vectors of 16 bytes in a row, the last one perhaps not full."""
    return -(-hidden_size * element_size // VECTOR_BYTES)


def row_segments(hidden_size: int, element_size: int) -> int:
    """Segments that a row takes."""
    return -(-hidden_size * element_size // SEGMENT_BYTES)


def rows_per_launch(hidden_size: int, element_size: int, world_size: int) -> int:
    """Rows that the ring holds at once; a call with more is several launches."""
    return segments(world_size, element_size) // row_segments(hidden_size, element_size)


class Geometry(NamedTuple):
    """How one row is spread over the GPU. The results' bits don't depend on it.

    Attributes:
        cluster: Blocks that share a row.
        threads: Threads of a block, a multiple of 64.
        vectors: 16-byte vectors a thread handles.
        blocks: Blocks that a multiprocessor has to be able to hold, which limits registers.
    """

    cluster: int
    threads: int
    vectors: int
    blocks: int


@lru_cache(maxsize=4096)
def geometry(
    hidden_size: int,
    element_size: int,
    world_size: int,
    tokens: int,
    multiprocessors: int,
    has_clusters: bool,
) -> Geometry:
    """The spread of a row for a launch of `tokens` rows.

    Args:
        hidden_size: Elements of a row.
        element_size: Bytes of an element of x.
        world_size: Ranks in the group.
        tokens: Rows of the launch.
        multiprocessors: Those of the GPU, divided by the ranks that share it.
        has_clusters: The GPU has thread block clusters (NVIDIA sm_90 on).
    """
    vectors = vectors_of(hidden_size, element_size)
    cluster = 1
    if has_clusters:
        # Halve the block while it is larger than 512 threads, or while there are few rows
        # and so multiprocessors to spare, down to 128 threads.
        while cluster < 8 and _threads(vectors, cluster, 1) > 512:
            cluster *= 2
        while (
            cluster < 4
            and _threads(vectors, cluster * 2, 1) >= 128
            and tokens * cluster * 2 <= multiprocessors // 2
        ):
            cluster *= 2
    per_thread = 1
    while _threads(vectors, cluster, per_thread) > _MAX_THREADS:
        per_thread *= 2
    threads = _threads(vectors, cluster, per_thread)
    # A thread keeps a vector of every rank: from 7 ranks on it needs more than 64 registers.
    budget = _MAX_THREADS if world_size <= 6 and per_thread == 1 else _MAX_THREADS // 2
    return Geometry(cluster, threads, per_thread, min(8, max(1, budget // threads)))


def _threads(vectors: int, cluster: int, per_thread: int) -> int:
    """Threads of a block: enough for its part of the row, in multiples of 64."""
    step = 2 * _WARP
    return -(-vectors // (cluster * per_thread * step)) * step

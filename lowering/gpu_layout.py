"""Sizes of the GPU workspace and the shape of a launch: pure functions, the same on every rank.

A rank's workspace has a region of receive places for each algorithm, then the states of their
segments and a control word. A place is a segment of SEGMENT_BYTES.

* one-shot: [2 slots][source][segment]; a row takes whole segments.
* two-shot: [2 slots][source][segment] for what the owner of a row receives, then
  [owner][segment] for the sums; segments are counted for each owner.

A call with more rows than a region has room for streams through it in chunks. So the size depends
on the number of ranks alone, in MiB per rank:

    world size     2      3     4    5 to 8      9 to 16
    one-shot      12     12    18   24 to 42     32 to 60
    two-shot       0      9     9   12 to 21      6 to 11.25
    together      12     21    27   36 to 63     38 to 71.25
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

#: Bytes of a segment: 512 vectors of 16 bytes. `kSegment` of the kernel.
SEGMENT_BYTES: Final = 8192
#: One-shot's receive slots, which take turns.
SLOTS: Final = 2
#: Two-shot's places for a peer and a segment: two slots of parts, one of sums.
TWO_SHOT_PLACES: Final = 3
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
_MAX_THREADS: Final = 512
_WARP: Final = 32


def segments(world_size: int) -> int:
    """Segments of one-shot's region."""
    return 768 if world_size == 2 else 384 if world_size <= 8 else 256


def owner_segments(world_size: int) -> int:
    """Segments of two-shot's region for each owner; none for two ranks, who use one-shot alone."""
    if world_size <= 2:
        return 0
    return 192 if world_size == 3 else 128 if world_size <= 8 else 32


class Region(NamedTuple):
    """The receive places of an algorithm, as byte offsets in a rank's workspace.

    Attributes:
        buffer: Of the places.
        state: Of the segments' states.
        segments: One-shot: segments; two-shot: those of each owner.
    """

    buffer: int
    state: int
    segments: int


class Layout(NamedTuple):
    """The workspace of one rank.

    Attributes:
        one_shot: The region of one-shot, which comes first.
        two_shot: The region of two-shot.
        states: Byte offset of the first state; the receive places end there.
        control: Byte offset of the control word.
        total: Bytes of the workspace.
    """

    one_shot: Region
    two_shot: Region
    states: int
    control: int
    total: int

    def region(self, algorithm: str) -> Region:
        """What a call by "one-shot" or "two-shot" uses, for elements of any width."""
        return self.two_shot if algorithm == "two-shot" else self.one_shot


@lru_cache
def layout(world_size: int) -> Layout:
    """The workspace of one rank of a group; a rank keeps no place for its own data."""
    peers = world_size - 1
    one, two = segments(world_size), owner_segments(world_size)
    two_shot = one * SLOTS * peers * SEGMENT_BYTES
    states = two_shot + two * TWO_SHOT_PLACES * peers * SEGMENT_BYTES
    two_shot_states = states + one * STATE_BYTES
    control = two_shot_states + two * world_size * STATE_BYTES
    return Layout(
        Region(0, states, one),
        Region(two_shot, two_shot_states, two),
        states,
        control,
        control + CONTROL_BYTES,
    )


def takes(hidden_size: int, world_size: int) -> bool:
    """True if the kernel takes such rows and such a group."""
    return 1 <= hidden_size <= MAX_HIDDEN_SIZE and 2 <= world_size <= MAX_WORLD_SIZE


def vectors_of(hidden_size: int, element_size: int) -> int:
    """Vectors of 16 bytes in a row, the last one perhaps not full."""
    return -(-hidden_size * element_size // VECTOR_BYTES)


def row_segments(hidden_size: int, element_size: int) -> int:
    """Segments that a row takes."""
    return -(-hidden_size * element_size // SEGMENT_BYTES)


def rows_per_launch(
    hidden_size: int, element_size: int, world_size: int, algorithm: str = "one-shot"
) -> int:
    """Rows that an algorithm's region holds at once; a call with more is several launches."""
    of_a_row = row_segments(hidden_size, element_size)
    if algorithm == "two-shot":
        return owner_segments(world_size) // of_a_row * world_size
    return segments(world_size) // of_a_row


class Geometry(NamedTuple):
    """How one row is spread over the GPU. The results' bits don't depend on it.

    Attributes:
        cluster: Blocks that share a row.
        threads: Threads of a block, a multiple of 32, of 64 where there are no clusters.
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
    is_plain: bool = False,
) -> Geometry:
    """The spread of a row for a launch of `tokens` rows.

    Args:
        hidden_size: Elements of a row.
        element_size: Bytes of an element of x.
        world_size: Ranks in the group.
        tokens: Rows of the launch.
        multiprocessors: Those of the GPU, divided by the ranks that share it.
        has_clusters: The GPU has thread block clusters (NVIDIA sm_90 on).
        is_plain: The call takes few registers a thread, see `gpu_variant.is_plain`.
    """
    vectors = vectors_of(hidden_size, element_size)
    # A thread keeps a vector of every rank. From these bounds follow how many registers it may
    # have; the numbers are those at which the compilers spill none (test_gpu_registers.py).
    few_ranks = 8 if has_clusters else 4
    long_row = not has_clusters and vectors > 2 * _MAX_THREADS
    most = _MAX_THREADS // 2 if world_size > few_ranks or long_row else _MAX_THREADS
    # Where tokens are many a row in one large block is faster than in a cluster of two: 64 x
    # 8192 bfloat16 of 2 ranks that share an H200 5.8 and 6.1 us, 32 x 7168 of 4 ranks 8.3 and 9.0.
    wide = 2 * most if is_plain and has_clusters and world_size <= 4 else most
    step = _WARP if has_clusters else 2 * _WARP
    cluster = 1
    if has_clusters:
        # Halve the block while it is too large, or while there are few rows and so
        # multiprocessors to spare, down to three warps.
        while cluster < 8 and (
            _threads(vectors, cluster, step) > wide
            or (
                _threads(vectors, cluster, step) > most
                and tokens * cluster * 2 <= multiprocessors
            )
        ):
            cluster *= 2
        while (
            cluster < 4
            and _threads(vectors, cluster * 2, step) >= 3 * _WARP
            and tokens * cluster * 2 <= multiprocessors // 2
        ):
            cluster *= 2
    per_thread = 1
    while _threads(vectors, cluster * per_thread, step) > wide:
        per_thread *= 2
    threads = _threads(vectors, cluster * per_thread, step)
    budget = 2 * most if world_size <= 4 and per_thread == 1 else most
    return Geometry(cluster, threads, per_thread, min(8, max(1, budget // threads)))


def _threads(vectors: int, shares: int, step: int) -> int:
    """Threads of a block that handles one of so many shares of a row, in multiples of `step`.

    That is a warp, but two where there are no clusters: AMD's wavefront.
    """
    return -(-vectors // (shares * step)) * step

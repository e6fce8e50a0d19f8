"""What the candidates of the kernels benchmark send, counted: bytes and hops.

The figures are of the algorithms, not of a measurement; where ranks share a GPU nothing crosses a
link at all.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

#: Bytes a second from one GPU to the others: NVLink 4 of H100 and H200, 18 links of 25 GB/s.
LINK_BYTES_PER_SECOND: Final = 450e9


class Traffic(NamedTuple):
    """What one op makes a rank do.

    Attributes:
        sent: Bytes that leave the GPU of the rank that sends most.
        hops: Crossings of a link that follow one another, each waiting for the one before: a
            push or a flag is one, a read of another rank's memory is two.
    """

    sent: int
    hops: int

    @property
    def microseconds(self) -> float:
        """The time of the bytes alone over one GPU's links at their full rate."""
        return self.sent / LINK_BYTES_PER_SECOND * 1e6


def push_one_shot(tokens: int, row_bytes: int, world_size: int) -> Traffic:
    """Every rank pushes its rows to every other, each of which waits for the data itself."""
    return Traffic((world_size - 1) * tokens * row_bytes, 1)


def push_two_shot(tokens: int, row_bytes: int, world_size: int) -> Traffic:
    """Rows go to their owner (row mod world size), whose sum goes to every other rank.

    With tokens a multiple of the world size that is 2 (W - 1) / W of the data.
    """
    owned = math.ceil(tokens / world_size)
    return Traffic((tokens - owned + (world_size - 1) * owned) * row_bytes, 2)


def flashinfer_two_shot(tokens: int, row_bytes: int, world_size: int) -> Traffic:
    """A barrier, reads of the owned rows, pushes of their sums with a second barrier."""
    return Traffic(push_two_shot(tokens, row_bytes, world_size).sent, 4)


def torch_one_shot(tokens: int, row_bytes: int, world_size: int) -> Traffic:
    """A barrier, every other rank reads all rows, a barrier."""
    return Traffic((world_size - 1) * tokens * row_bytes, 4)


def torch_two_shot(tokens: int, row_bytes: int, world_size: int) -> Traffic:
    """A barrier, reads of a share, a barrier, reads of the others' sums, a barrier."""
    share = math.ceil(tokens * row_bytes / world_size)
    return Traffic(2 * (world_size - 1) * share, 7)


def ring(tokens: int, row_bytes: int, world_size: int) -> Traffic:
    """A ring: reduce-scatter and all-gather, each in W - 1 steps. NCCL may choose another."""
    share = math.ceil(tokens * row_bytes / world_size)
    return Traffic(2 * (world_size - 1) * share, 2 * (world_size - 1))

"""The Triton kernel in Triton's interpreter, on a machine without a GPU: its numbers, its protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton_ranks
from triton_registers import triton_is_missing

from fx_fusion.testing import spawn

pytestmark = pytest.mark.skipif(triton_is_missing() != "", reason=triton_is_missing())

#: World size to how many calls: one takes half a second.
CALLS = {2: 8, 3: 6}


def test_what_follows_the_sum_gives_the_bits_of_the_contract() -> None:
    assert spawn(triton_ranks.local_forms, 1) == [[]]


@pytest.mark.parametrize("size", CALLS)
def test_ranks_exchange_rows_and_notice_failures(size: int, tmp_path: Path) -> None:
    ranks = spawn(triton_ranks.protocol, size, timeout=120, args=(str(tmp_path), CALLS[size]))
    assert [name for failed in ranks for name in failed.items() if name[1]] == []
    assert len(ranks) == size

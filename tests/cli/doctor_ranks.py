"""What the ranks of the doctor's tests do."""

from __future__ import annotations

import os

from fx_fusion.doctor.check import Check
from fx_fusion.doctor.examination import examine_ranks
from fx_fusion.doctor.ranks import leave


def examined(rank: int, world_size: int, odd: int) -> list[Check]:
    """Examine all ranks, of which `odd` has fx_fusion switched off."""
    if rank == odd:
        os.environ["FX_FUSION_DISABLE"] = "1"
    own, checks = examine_ranks(timeout=40)
    assert own == rank
    leave()
    return checks

"""torch.cuda.graph by hand around a compiled model: replays with inputs that change."""

from __future__ import annotations

import hand_captured_jobs
import pytest
import torch

from fx_fusion.testing import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
]

RANKS = 2


def test_replays_with_inputs_that_change(side_by_side: None) -> None:
    job = hand_captured_jobs.captured_by_hand
    results = spawn(job, RANKS, device="cuda", timeout=150, args=((8, 1, 33), 10_000))
    assert results == [[]] * RANKS

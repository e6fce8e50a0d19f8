"""Ranks of a GPU group make sure that they were planned alike."""

from __future__ import annotations

from unittest import mock

import plan_ranks
import torch
import torch.distributed as dist

from fx_fusion.lowering import gpu_plan
from fx_fusion.testing import fake_group, spawn


def test_ranks_that_were_planned_differently_raise_alike() -> None:
    one, two = spawn(plan_ranks.meetings, 2, timeout=60)
    assert one == two
    assert one[:4] == ["", "", "", ""]
    assert "rank 0 has 'fx_fusion-1', rank 1 has 'unfused-1'" in one[4]


def test_a_plan_is_exchanged_once_and_not_by_a_fake_group() -> None:
    device = torch.device("cpu")
    with (
        mock.patch.object(gpu_plan, "agree") as agree,
        mock.patch.object(gpu_plan, "_agreed", {}),
        fake_group(2) as group,
    ):
        gpu_plan.agree_on_plan(group, device, "auto-1")
        assert agree.call_count == 0
        with mock.patch.object(dist, "get_backend", return_value="gloo"):
            for plan in ("auto-2", "auto-2", "auto-3", "auto-2"):
                gpu_plan.agree_on_plan(group, device, plan)
        assert agree.call_count == 2

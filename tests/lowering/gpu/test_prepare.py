"""What `prepare` tells a group's GPU workspace, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fx_fusion
from fx_fusion.lowering import gpu_workspace
from fx_fusion.testing import fake_group


def test_a_limit_of_blocks_holds_for_kernels_loaded_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(group: dist.ProcessGroup, device: torch.device) -> gpu_workspace.GpuWorkspace:
        return workspace

    monkeypatch.setattr(gpu_workspace, "gpu_workspace", made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    given: dict[str, Any] = {"device": "cuda:0"}
    with fake_group(2) as group:
        workspace = gpu_workspace.GpuWorkspace(group, torch.device("cuda", 0))
        workspace.launchers["a variant"] = object()
        assert fx_fusion.prepare(group, **given)
        assert (workspace.block_limit, len(workspace.launchers)) == (0, 1)
        assert fx_fusion.prepare(group, block_limit=33, **given)
        # a launcher holds the number it was made with
        assert (workspace.block_limit, workspace.launchers) == (33, {})
        assert fx_fusion.prepare(group, **given)
        assert workspace.block_limit == 33

"""When a call runs on the kernel in Triton: where a rank can't compile the first one."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from fx_fusion.lowering import dispatch, gpu_workspace, triton_workspace
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.gpu_workspace import GpuWorkspace
from fx_fusion.lowering.select import digest_of
from fx_fusion.lowering.triton_workspace import TritonWorkspace
from fx_fusion.settings import FusionSettings

GROUP = cast(dist.ProcessGroup, object())  # no field of it is read
DEVICE = torch.device("cuda", 0)


def taken(
    monkeypatch: pytest.MonkeyPatch, kernel: str, first: GpuWorkspace, second: TritonWorkspace
) -> bool:
    """True if a call of a plan for `kernel` gets the second workspace."""
    made: list[str] = []

    def make(group: Any, device: Any) -> TritonWorkspace:
        made.append("second")
        return second

    monkeypatch.setattr(dispatch, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(gpu_workspace, "gpu_workspace", lambda group, device: first)
    monkeypatch.setattr(triton_workspace, "triton_workspace", make)
    with FakeTensorMode():
        x = torch.empty(4, 4096, dtype=torch.bfloat16, device="cuda")
        plan = digest_of(FusionSettings(kernel=kernel))
        weight = torch.empty(4096, dtype=torch.bfloat16, device="cuda")
        arguments = Arguments(x, x, weight, None, 1e-6, "", 2, plan=plan)
        found = dispatch.triton_workspace_for(arguments, GROUP)
    assert found is None or found is second
    assert found is None or made == ["second"]
    return found is not None


def test_it_is_taken_where_a_rank_lacks_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    first = GpuWorkspace(GROUP, DEVICE, "rank 1: NVRTC can't be loaded", lacks_compiler=True)
    assert taken(monkeypatch, "fx_fusion", first, TritonWorkspace(GROUP, DEVICE))
    assert not taken(monkeypatch, "auto", first, TritonWorkspace(GROUP, DEVICE))
    assert not taken(monkeypatch, "unfused", first, TritonWorkspace(GROUP, DEVICE))
    assert not taken(monkeypatch, "fx_fusion", first, TritonWorkspace(GROUP, DEVICE, "none"))


@pytest.mark.parametrize(
    "refusal", ["", "its ranks are on 2 hosts", "the workspace was closed"]
)
def test_it_is_not_taken_for_another_cause(
    refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = GpuWorkspace(GROUP, DEVICE, refusal)
    assert not taken(monkeypatch, "fx_fusion", first, TritonWorkspace(GROUP, DEVICE))


def test_a_closed_group_gets_no_memory_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        group_name = "closed"

    group = cast(dist.ProcessGroup, Group())
    monkeypatch.setattr(triton_workspace, "_workspaces", {})
    triton_workspace.close(group, DEVICE, also_later=False)
    assert triton_workspace._workspaces == {}
    triton_workspace.close(group, DEVICE, also_later=True)
    assert (
        triton_workspace.triton_workspace(group, DEVICE).refusal == "the workspace was closed"
    )

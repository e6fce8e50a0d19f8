"""What `prepare` tells a group's GPU workspace, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fx_fusion
from fx_fusion.lowering import gpu_build, gpu_kernel, gpu_local, gpu_usual, gpu_workspace
from fx_fusion.lowering.gpu_variant import Variant
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


def test_the_kernels_of_every_number_of_tokens_are_compiled_ahead_and_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What calls of 1 to 64 tokens launch is what was compiled ahead, on each rank's cores."""
    compiled: list[set[Variant]] = []
    loaded: set[Variant] = set()

    def ahead(variants: set[Variant], arch: str, threads: int) -> None:
        assert (arch, threads) == ("sm_90", 3)
        compiled.append(set(variants))

    def launcher(arguments: Any, rows: int, workspace: Any, algorithm: str) -> None:
        loaded.add(gpu_kernel.variant_for(arguments, rows, workspace, algorithm))

    def no_machine(index: int) -> None:
        return None

    monkeypatch.setattr(gpu_build, "compile_ahead", ahead)
    monkeypatch.setattr(gpu_kernel, "launcher_for", launcher)
    monkeypatch.setattr(gpu_local, "machine_of", no_machine)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    with fake_group(4) as group:
        workspace = gpu_workspace.GpuWorkspace(
            group, torch.device("cpu"), arch="sm_90", multiprocessors=132
        )
        gpu_usual.load_usual_variants(workspace, 64, 4096, torch.bfloat16)
    assert compiled == [loaded]
    assert {variant.algorithm for variant in loaded} == {"one-shot", "two-shot"}

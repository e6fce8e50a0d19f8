"""Sizes of the GPU workspace and shapes of launches, as pure functions over the whole grid."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fx_fusion.lowering import gpu_build, gpu_kernel, gpu_layout, select
from fx_fusion.lowering.select import GPU_ONE_SHOT, Plan, Problem, Refusal, Row, gpu_max_tokens
from fx_fusion.settings import FusionSettings

WORLDS = range(2, 17)
HIDDEN = (1, 63, 64, 1032, 2880, 4096, 5120, 7168, 8192, 16384)
MIB = 2**20
#: FlashInfer's workspace per rank for 2048 tokens x 7168 in bf16: one buffer of all ranks' rows
#: and three Lamport buffers of the same size. 896 MiB at world size 8.
FLASHINFER_BYTES = {world: 4 * world * 2048 * 7168 * 2 for world in (2, 4, 8)}


@pytest.mark.parametrize(("world", "most"), [(2, 18.1), (4, 54.1), (8, 63.1), (16, 67.6)])
def test_the_memory_of_a_rank_is_what_the_documentation_says(world: int, most: float) -> None:
    assert most - 0.2 < gpu_layout.layout(world).total / MIB <= most


@pytest.mark.parametrize("world", sorted(FLASHINFER_BYTES))
def test_the_memory_is_at_most_an_eighth_of_flashinfers(world: int) -> None:
    assert gpu_layout.layout(world).total * 8 <= FLASHINFER_BYTES[world]


@pytest.mark.parametrize("world", WORLDS)
def test_the_parts_of_a_workspace_do_not_overlap_and_are_aligned(world: int) -> None:
    layout = gpu_layout.layout(world)
    starts = [layout.buffers[2], layout.buffers[4], layout.states[2], layout.states[4]]
    starts += [layout.control, layout.total]
    for width in (2, 4):
        cells = gpu_layout.SLOTS * (world - 1) * gpu_layout.segments(world, width)
        assert layout.buffers[width] + cells * gpu_layout.SEGMENT_BYTES == starts[width // 2]
    assert starts == sorted(starts)
    assert all(start % 256 == 0 for start in starts)


@pytest.mark.parametrize("world", WORLDS)
def test_the_ring_holds_a_row_of_every_size(world: int) -> None:
    for hidden, width in itertools.product(HIDDEN, (2, 4)):
        assert gpu_layout.takes(hidden, world)
        assert gpu_layout.rows_per_launch(hidden, width, world) >= 1


def test_sizes_beyond_the_limits_are_not_taken() -> None:
    assert not gpu_layout.takes(16385, 2)
    assert not gpu_layout.takes(0, 2)
    assert not gpu_layout.takes(64, 1)
    assert not gpu_layout.takes(64, 17)


@pytest.mark.parametrize("clusters", [False, True])
def test_every_spread_covers_the_row_within_the_hardware_s_limits(clusters: bool) -> None:
    for hidden, width, world, tokens, many in itertools.product(
        HIDDEN, (2, 4), (2, 4, 8, 16), (1, 2, 8, 64, 2048), (1, 16, 66, 132)
    ):
        shape = gpu_layout.geometry(hidden, width, world, tokens, many, clusters)
        covered = shape.cluster * shape.threads * shape.vectors * 16
        assert covered >= hidden * width
        assert shape.threads % 64 == 0
        assert shape.threads <= 1024
        assert shape.cluster in ((1, 2, 4, 8) if clusters else (1,))
        assert shape.threads * shape.blocks <= 2048


def test_the_parameters_are_laid_out_as_the_kernel_reads_them() -> None:
    # 10 pointers, 2 ints, 2 floats; 3 ints, 1 float; 2 ints, 4 and 16 words of 8 bytes: nothing
    # that the compiler would pad.
    assert gpu_kernel._CALL.size == 96
    assert gpu_kernel._HIDDEN.size == 16
    assert gpu_kernel._WORKSPACE.size == 168
    body = re.search(
        r"struct Params \{(.*?)\n\};", gpu_build.sources()["gpu_params.h"], re.DOTALL
    )
    assert body is not None
    names = re.findall(r"(\w+)(?:\[16\])?;", body.group(1))
    assert names[:4] == ["x", "residual", "weight", "bias"]
    assert names[10:19] == [
        "rows", "clusters", "eps", "scale", "hidden", "vectors", "row_segments",
        "inverse_hidden", "rank",
    ]  # fmt: skip
    assert names[19:] == ["segments", "timeout", "state", "control", "host", "buffers"]


PROBLEM = Problem(4096, torch.bfloat16, 2, "sm_90", None, False)
ROW = Row(GPU_ONE_SHOT, "sm_90", 2, "bfloat16", 4096, 64, "an example", "2000-01-01", "none")


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(select, "TABLE", (ROW,))
    monkeypatch.setattr(select, "GPU_PROVEN", frozenset({("sm_90", 2)}))
    gpu_max_tokens.cache_clear()
    yield
    monkeypatch.undo()
    gpu_max_tokens.cache_clear()


def most(kernel: str = "auto", hidden: int = 4096, **changes: object) -> int:
    given = {"arch": "sm_90", "world_size": 2, "dtype": torch.bfloat16, "deterministic": False}
    return gpu_max_tokens(kernel, hidden_size=hidden, **{**given, **changes})


def test_without_measurements_auto_never_takes_the_kernel() -> None:
    if not select.TABLE:
        assert most() == 0
        assert select.select(PROBLEM, FusionSettings()) == Plan(
            "unfused",
            select.digest_of(FusionSettings()),
            "nothing was measured for sm_90 and this size",
        )


@pytest.mark.usefixtures("one_row")
def test_a_row_holds_for_its_size_and_smaller_ones_up_to_and_including_its_limit() -> None:
    assert most() == most(hidden=63) == 64
    assert most(hidden=4097) == 0
    assert most(dtype=torch.float16) == most(world_size=4) == most(arch="sm_100") == 0
    kernels = [
        select.select(replace(PROBLEM, tokens=tokens), FusionSettings())
        for tokens in (None, 64, 65)
    ]
    assert [k.kernel for k in kernels if isinstance(k, Plan)] == [
        GPU_ONE_SHOT, GPU_ONE_SHOT, "unfused",
    ]  # fmt: skip


@pytest.mark.usefixtures("one_row")
def test_the_kernel_by_name_and_deterministic_sums_take_every_size() -> None:
    assert most("fx_fusion") == most(deterministic=True) == sys.maxsize
    assert most("unfused", deterministic=True) == 0
    assert most("fx_fusion", hidden=16385) == most("fx_fusion", arch="gfx942") == 0


def test_an_arch_without_a_passing_run_needs_the_option() -> None:
    assert most(arch="sm_100", deterministic=True) == 0
    assert most(world_size=4, deterministic=True) == 0
    assert most("fx_fusion", arch="sm_100") == sys.maxsize
    refusal = select.select(replace(PROBLEM, arch="gfx942"), FusionSettings(kernel="fx_fusion"))
    assert isinstance(refusal, Refusal)

"""Sizes of the GPU workspace and shapes of launches, as pure functions over the whole grid."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fx_fusion.lowering import gpu_build, gpu_layout, gpu_loaded, gpu_select, select
from fx_fusion.lowering.gpu_select import (
    GPU_ONE_SHOT,
    GPU_TWO_SHOT,
    Row,
    gpu_algorithm,
    gpu_limits,
    gpu_max_tokens,
    gpu_takes_local,
)
from fx_fusion.lowering.gpu_workspace import mark_empty
from fx_fusion.lowering.select import Plan, Problem, Refusal
from fx_fusion.report import Reason
from fx_fusion.settings import FusionSettings

WORLDS = range(2, 17)
HIDDEN = (1, 63, 64, 1032, 2880, 4096, 5120, 7168, 8192, 16384)
MIB = 2**20
#: FlashInfer's workspace per rank, in bf16: one buffer of all ranks' rows and three Lamport
#: buffers of the same size. 896 MiB at world size 8.
FLASHINFER_BYTES = {
    world: 4 * world * 2048 * hidden * 2 for world, hidden in ((2, 4096), (4, 4096), (8, 7168))
}


@pytest.mark.parametrize(
    ("world", "most"), [(2, 12.1), (3, 21.1), (4, 27.1), (8, 63.1), (16, 71.4)]
)
def test_the_memory_of_a_rank_is_what_the_documentation_says(world: int, most: float) -> None:
    assert most - 0.2 < gpu_layout.layout(world).total / MIB <= most


@pytest.mark.parametrize("world", sorted(FLASHINFER_BYTES))
def test_the_memory_is_at_most_an_eighth_of_flashinfers(world: int) -> None:
    assert gpu_layout.layout(world).total * 8 <= FLASHINFER_BYTES[world]


@pytest.mark.parametrize("world", WORLDS)
def test_the_parts_of_a_workspace_do_not_overlap_and_are_aligned(world: int) -> None:
    layout = gpu_layout.layout(world)
    one, two = layout.one_shot, layout.two_shot
    sizes = [  # of each part, in their order
        one.segments * gpu_layout.SLOTS * (world - 1) * gpu_layout.SEGMENT_BYTES,
        two.segments * gpu_layout.TWO_SHOT_PLACES * (world - 1) * gpu_layout.SEGMENT_BYTES,
        one.segments * gpu_layout.STATE_BYTES,
        two.segments * world * gpu_layout.STATE_BYTES,
        gpu_layout.CONTROL_BYTES,
    ]
    starts = [one.buffer, two.buffer, one.state, two.state]
    starts += [layout.control, layout.total]
    assert layout.states == one.state
    assert starts == [0, *itertools.accumulate(sizes)]
    assert all(start % 256 == 0 for start in starts)


def test_empty_places_are_marked_and_states_are_zero() -> None:
    layout = gpu_layout.layout(3)
    memory = torch.empty(layout.total, dtype=torch.uint8)
    mark_empty(memory, layout)
    assert bool((memory[: layout.states] == 0xFF).all())
    assert not memory[layout.states :].any()


@pytest.mark.parametrize("world", WORLDS)
def test_the_ring_holds_a_row_of_every_size(world: int) -> None:
    for hidden, width in itertools.product(HIDDEN, (2, 4)):
        assert gpu_layout.takes(hidden, world)
        assert gpu_layout.rows_per_launch(hidden, width, world) >= 1
        if world > 2:
            assert gpu_layout.rows_per_launch(hidden, width, world, "two-shot") >= world


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
        assert shape.threads % (32 if clusters else 64) == 0
        assert shape.threads <= 1024
        assert shape.cluster in ((1, 2, 4, 8) if clusters else (1,))
        assert shape.threads * shape.blocks <= 2048


def test_the_parameters_are_laid_out_as_the_kernel_reads_them() -> None:
    # 10 pointers, 2 ints, 2 floats; 3 ints, 1 float; 2 ints, 4 and 16 words of 8 bytes: nothing
    # that the compiler would pad.
    assert gpu_loaded.CALL.size == 96
    assert gpu_loaded.HIDDEN.size == 16
    assert gpu_loaded.WORKSPACE.size == 168
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


ROWS = (
    ROW,
    replace(ROW, world_size=4, max_tokens=16),
    replace(ROW, world_size=4, hidden_size=8192, max_tokens=8),
    replace(ROW, kernel=GPU_TWO_SHOT, world_size=4, hidden_size=8192, max_tokens=512),
)


@pytest.fixture
def some_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_select, "TABLE", ROWS)
    monkeypatch.setattr(gpu_select, "GPU_PROVEN", frozenset({("sm_90", 2), ("sm_90", 4)}))
    gpu_limits.cache_clear()
    yield
    monkeypatch.undo()
    gpu_limits.cache_clear()


def most(kernel: str = "auto", hidden: int = 4096, **changes: Any) -> int:
    given: dict[str, Any] = {
        "arch": "sm_90",
        "world_size": 2,
        "dtype": torch.bfloat16,
        "deterministic": False,
    }
    return gpu_max_tokens(kernel, hidden_size=hidden, **{**given, **changes})


def test_two_h200s_fuse_every_size_that_was_measured() -> None:
    assert most() == most(hidden=2880) == most(hidden=8192) == 8192
    assert most(dtype=torch.float16) == most(dtype=torch.float32) == 8192
    assert most(hidden=8193) == most(hidden=16384) == 1024
    answers = [
        select.select(replace(PROBLEM, tokens=tokens), FusionSettings())
        for tokens in (1, None, 8192, 8193)
    ]
    assert [a.kernel for a in answers if isinstance(a, Plan)] == [GPU_ONE_SHOT] * 3
    assert isinstance(answers[3], Refusal)
    assert answers[3].reason is Reason.NOT_FASTER
    assert answers[3].numbers["tokens"] == 8193
    assert "up to 8192 tokens" in str(answers[3].numbers["cause"])


def test_what_was_not_measured_is_fused_while_little_is_sent() -> None:
    # 1 MiB over W-1 copies of a row
    assert most(world_size=4) == 1024 * 1024 // (3 * 8192) == 42
    assert most(world_size=8, hidden=8192) == 9
    assert most(dtype=torch.float16, hidden=16384) == 32
    assert most(dtype=torch.float32, hidden=16384) == 16
    assert most(world_size=6, hidden=8192) == 12
    assert most(world_size=5) == most(arch="sm_100") == 0  # nothing is proven there


@pytest.mark.usefixtures("some_rows")
def test_a_row_holds_for_its_size_and_smaller_ones_up_to_and_including_its_limit() -> None:
    assert most() == most(hidden=63) == 64
    assert most(hidden=8192, world_size=2) == 64  # no row: by bytes
    assert most(world_size=8) == most(arch="sm_100") == 0
    kernels = [
        select.select(replace(PROBLEM, tokens=tokens), FusionSettings())
        for tokens in (None, 64, 65)
    ]
    assert [isinstance(k, Plan) and k.kernel for k in kernels] == [
        GPU_ONE_SHOT, GPU_ONE_SHOT, False,
    ]  # fmt: skip


@pytest.mark.usefixtures("some_rows")
def test_the_kernel_by_name_and_deterministic_sums_take_every_size() -> None:
    assert most("fx_fusion") == most(deterministic=True) == sys.maxsize
    assert most("unfused", deterministic=True) == 0
    assert most("fx_fusion", hidden=16385) == most("fx_fusion", arch="gfx908") == 0


def test_an_arch_without_a_passing_run_needs_the_option() -> None:
    assert most(arch="sm_100", deterministic=True) == 0
    assert most(world_size=5, deterministic=True) == 0
    assert most("fx_fusion", arch="sm_100") == sys.maxsize
    refusal = select.select(replace(PROBLEM, arch="gfx908"), FusionSettings(kernel="fx_fusion"))
    assert isinstance(refusal, Refusal)


@pytest.mark.parametrize("arch", gpu_select.AMD_ARCHS)
def test_amd_s_gpus_need_the_option(arch: str) -> None:
    problem = replace(PROBLEM, arch=arch)
    refusal = select.select(problem, FusionSettings())
    assert isinstance(refusal, Refusal)
    assert refusal.numbers["cause"] == (
        f'our kernels have not been run on {arch} yet; kernel="fx_fusion" turns them on'
    )
    plan = select.select(problem, FusionSettings(kernel="fx_fusion"))
    assert isinstance(plan, Plan)
    assert (plan.kernel, plan.cause) == (GPU_ONE_SHOT, "")
    assert most(arch=arch, deterministic=True) == 0


def algorithm(tokens: int, kernel: str = "auto", hidden: int = 4096, **changes: Any) -> str:
    given: dict[str, Any] = {
        "arch": "sm_90",
        "world_size": 4,
        "dtype": torch.bfloat16,
        "deterministic": False,
    }
    return gpu_algorithm(kernel, tokens=tokens, hidden_size=hidden, **{**given, **changes})


@pytest.mark.usefixtures("some_rows")
def test_the_table_splits_one_shot_two_shot_and_unfused_by_inclusive_limits() -> None:
    tokens = (1, 16, 17, 512, 513)
    assert [algorithm(n) for n in tokens] == [
        "one-shot", "one-shot", "two-shot", "two-shot", "unfused",
    ]  # fmt: skip
    assert [algorithm(n, hidden=8192) for n in (8, 9)] == ["one-shot", "two-shot"]
    assert [algorithm(n, world_size=2) for n in (64, 65)] == ["one-shot", "unfused"]
    assert algorithm(1, world_size=8) == "unfused"
    assert [algorithm(n, dtype=torch.float16) for n in (42, 43)] == ["one-shot", "unfused"]


@pytest.mark.usefixtures("some_rows")
def test_what_must_not_be_unfused_takes_two_shot_beyond_one_shot_s_limit() -> None:
    assert [algorithm(n, deterministic=True) for n in (16, 17, 10**6)] == [
        "one-shot", "two-shot", "two-shot",
    ]  # fmt: skip
    # no row: by bytes of x, 64 KiB at 8 ranks
    assert [algorithm(n, "fx_fusion", world_size=8) for n in (8, 9)] == [
        "one-shot", "two-shot",
    ]  # fmt: skip
    assert algorithm(1, "fx_fusion", hidden=16384, dtype=torch.float32) == "one-shot"
    assert algorithm(10**6, "fx_fusion", world_size=2) == "one-shot"
    assert algorithm(1, "unfused") == algorithm(1, "flashinfer") == "unfused"


def test_a_forced_plan_takes_one_algorithm_at_every_size() -> None:
    one, two = (select.kernel_of(select.forced_plan(a)) for a in ("one-shot", "two-shot"))
    for tokens in (1, 10**6):
        assert algorithm(tokens, one) == algorithm(tokens, two, world_size=2) == "one-shot"
        assert algorithm(tokens, two) == "two-shot"
        assert algorithm(tokens, two, hidden=16385) == "unfused"


@pytest.mark.usefixtures("some_rows")
def test_the_report_names_the_algorithm() -> None:
    problem = replace(PROBLEM, world_size=4)
    plans = [
        select.select(replace(problem, tokens=tokens), FusionSettings())
        for tokens in (16, 512, 513, None)
    ]
    assert [isinstance(plan, Plan) and plan.kernel for plan in plans] == [
        GPU_ONE_SHOT, GPU_TWO_SHOT, False, f"{GPU_ONE_SHOT} or two-shot",
    ]  # fmt: skip


def test_the_local_kernel_runs_where_it_has_passed_or_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_select, "GPU_LOCAL_PROVEN", frozenset({"sm_90"}))
    assert gpu_takes_local("auto", "sm_90", 4096)
    assert gpu_takes_local("fx_fusion", "sm_80", 4096)
    assert not gpu_takes_local("auto", "sm_80", 4096)
    assert gpu_takes_local("fx_fusion", "gfx942", 4096)
    assert not gpu_takes_local("auto", "gfx942", 4096)
    assert not gpu_takes_local("auto", "sm_90", 16385)

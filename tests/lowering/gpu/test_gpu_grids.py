"""Which path a call takes and where its data goes, over tokens, hidden sizes, ranks and dtypes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_fusion.lowering import gpu_layout, gpu_select, select
from fx_fusion.lowering.gpu_layout import SEGMENT_BYTES, SLOTS, STATE_BYTES, TWO_SHOT_PLACES
from fx_fusion.lowering.gpu_select import (
    GPU_ONE_SHOT,
    GPU_TWO_SHOT,
    Row,
    gpu_algorithm,
    gpu_limits,
    gpu_max_tokens,
)
from fx_fusion.lowering.select import Plan, Problem, Refusal
from fx_fusion.report import Reason
from fx_fusion.settings import FusionSettings

TOKENS = (1, 2, 3, 7, 8, 63, 64, 65, 128, 513, 2048, 8192, 10**6)
HIDDEN = (1, 63, 1032, 2880, 4096, 5120, 7168, 8192, 16384)
WORLDS = (2, 3, 4, 6, 8, 16)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS = ("auto", "fx_fusion", "one_shot", "two_shot", "unfused")
#: From the path of few tokens to that of many.
ORDER = ("one-shot", "two-shot", "unfused")
GRID = list(itertools.product(HIDDEN, WORLDS, DTYPES))

rows = st.builds(
    Row,
    kernel=st.sampled_from((GPU_ONE_SHOT, GPU_TWO_SHOT)),
    arch=st.just("sm_90"),
    world_size=st.sampled_from(WORLDS),
    dtype=st.sampled_from(("bfloat16", "float32")),
    hidden_size=st.sampled_from(HIDDEN),
    max_tokens=st.sampled_from(TOKENS),
    machine=st.just("an example"),
    date=st.just("2000-01-01"),
    command=st.just("none"),
)


def key(row: Row) -> tuple[object, ...]:
    return row.kernel, row.world_size, row.dtype, row.hidden_size


#: Tables with one limit for each kernel and size.
tables = st.lists(rows, max_size=12, unique_by=key)


@pytest.fixture(autouse=True)
def fresh() -> None:
    gpu_limits.cache_clear()


def over(table: list[Row]) -> Any:
    """A table in which all archs and worlds are proven."""
    gpu_limits.cache_clear()
    proven = frozenset(("sm_90", world) for world in WORLDS)
    return mock.patch.multiple(gpu_select, TABLE=tuple(table), GPU_PROVEN=proven)


@settings(max_examples=40, deadline=None)
@given(table=tables, kernel=st.sampled_from(KERNELS), deterministic=st.booleans())
def test_more_tokens_never_lead_back_and_limits_are_inclusive(
    table: list[Row], kernel: str, deterministic: bool
) -> None:
    with over(table):
        for hidden, world, dtype in GRID:
            site = (kernel, "sm_90", world, dtype, hidden)
            limits = gpu_limits(*site, deterministic)
            given = {*TOKENS, *(n + d for n in limits for d in (-1, 0, 1))}
            tokens = sorted(n for n in given if 0 < n < 2**40)
            paths = [gpu_algorithm(*site, n, deterministic) for n in tokens]
            assert paths == sorted(paths, key=ORDER.index)
            most = gpu_max_tokens(*site, deterministic)
            assert [n <= most for n in tokens] == [path != "unfused" for path in paths]
            assert [n <= limits.one_shot for n in tokens] == [p == "one-shot" for p in paths]
            if world == 2:
                assert "two-shot" not in paths
    gpu_limits.cache_clear()


@settings(max_examples=25, deadline=None)
@given(table=tables, kernel=st.sampled_from(("auto", "fx_fusion", "unfused")))
def test_static_and_dynamic_plans_are_one_and_name_the_path_of_the_op(
    table: list[Row], kernel: str
) -> None:
    names = {"one-shot": GPU_ONE_SHOT, "two-shot": GPU_TWO_SHOT, "unfused": "unfused"}
    chosen = FusionSettings(kernel=kernel)
    with over(table):
        for hidden, world, dtype in GRID[::5]:
            problem = Problem(hidden, dtype, world, "sm_90", None, False)
            dynamic = select.select(problem, chosen)
            for tokens in TOKENS:
                static = select.select(replace(problem, tokens=tokens), chosen)
                path = names[
                    gpu_algorithm(kernel, "sm_90", world, dtype, hidden, tokens, False)
                ]
                if isinstance(static, Refusal):  # stays in the graph
                    assert (path, static.reason) == ("unfused", Reason.NOT_FASTER)
                    continue
                assert static.kernel == path
                assert isinstance(dynamic, Plan)
                assert static.digest == dynamic.digest
                assert (dynamic.kernel == "unfused") == (kernel == "unfused")
    gpu_limits.cache_clear()


def test_a_row_holds_for_smaller_hidden_sizes_and_a_bound_on_bytes_for_the_others() -> None:
    row = Row(GPU_ONE_SHOT, "sm_90", 4, "bfloat16", 4096, 64, "an example", "2000-01-01", "-")
    with over([row]):
        for hidden, world, dtype in GRID:
            most = gpu_max_tokens("auto", "sm_90", world, dtype, hidden, False)
            holds = world == 4 and dtype == torch.bfloat16 and hidden <= 4096
            safe = 1024 * 1024 // ((world - 1) * hidden * dtype.itemsize)
            assert most == (64 if holds else safe)
    gpu_limits.cache_clear()


@pytest.mark.parametrize(
    ("world", "expected"), [(2, 12_595_456), (4, 28_326_144), (8, 66_083_072)]
)
def test_the_bytes_of_a_rank(world: int, expected: int) -> None:
    assert gpu_layout.layout(world).total == expected


@pytest.mark.parametrize("world", range(2, 17))
def test_the_memory_depends_on_the_ranks_alone_and_takes_every_row(world: int) -> None:
    layout = gpu_layout.layout(world)
    places = {"one-shot": (SLOTS, 1), "two-shot": (TWO_SHOT_PLACES, world)}
    for hidden, dtype in itertools.product(HIDDEN, DTYPES):
        width = dtype.itemsize
        of_a_row = gpu_layout.row_segments(hidden, width)
        assert (of_a_row - 1) * SEGMENT_BYTES < hidden * width <= of_a_row * SEGMENT_BYTES
        for algorithm in ("one-shot", "two-shot")[: 1 if world == 2 else 2]:
            region = layout.region(algorithm)
            most = gpu_layout.rows_per_launch(hidden, width, world, algorithm)
            slots, owners = places[algorithm]
            # The last segment of the last row, as the kernels number segments.
            last = (most - 1) // owners * of_a_row + of_a_row - 1
            assert 0 <= last < region.segments
            # One more row of each owner would not fit.
            assert last + of_a_row >= region.segments
            end = region.buffer + slots * (world - 1) * region.segments * SEGMENT_BYTES
            assert end <= (layout.two_shot.buffer if algorithm == "one-shot" else layout.states)
            states = region.state + owners * region.segments * STATE_BYTES
            assert states <= layout.control


@settings(max_examples=200, deadline=None)
@given(
    hidden=st.integers(1, gpu_layout.MAX_HIDDEN_SIZE),
    width=st.sampled_from((2, 4)),
    world=st.integers(1, gpu_layout.MAX_WORLD_SIZE),
    tokens=st.integers(1, 10_000),
    multiprocessors=st.integers(1, 160),
    clusters=st.booleans(),
    plain=st.booleans(),
)
def test_every_vector_of_a_row_has_one_thread(
    hidden: int,
    width: int,
    world: int,
    tokens: int,
    multiprocessors: int,
    clusters: bool,
    plain: bool,
) -> None:
    shape = gpu_layout.geometry(hidden, width, world, tokens, multiprocessors, clusters, plain)
    vectors = gpu_layout.vectors_of(hidden, width)
    held = shape.cluster * shape.threads * shape.vectors
    assert vectors <= held
    # The last round of vectors has work to do.
    assert vectors > held - shape.cluster * shape.threads or shape.vectors > 1
    # Whole warps, and AMD's wavefronts; 128 leaves of 32 vectors; hardware's limits.
    assert shape.threads % (32 if clusters else 64) == 0
    assert vectors <= 128 * 32
    assert 32 <= shape.threads <= 1024
    assert shape.cluster in ((1, 2, 4, 8) if clusters else (1,))
    assert 1 <= shape.blocks <= 8
    assert shape.threads * shape.blocks <= 2048

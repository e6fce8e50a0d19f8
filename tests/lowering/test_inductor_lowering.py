"""The op in Inductor's generated code: called directly, in the graph's order of collectives."""

from __future__ import annotations

import re

import inductor_jobs
import pytest
from graph_caches import caches_left_alone

from fx_fusion.testing import fake_group, spawn

#: fp32; the norm adds up its squares in another order than eager.
CLOSE = 4e-6


def collectives(code: str) -> list[str]:
    """The collectives of generated code in the order they are called."""
    call = code[code.index("def call(") :]
    found = re.findall(
        r"^ +(fx_fusion_site)_\w+\(|(all_reduce_)\.default\(", call, re.MULTILINE
    )
    return ["site" if site else "all_reduce" for site, plain in found if site or plain]


def test_sites_are_called_directly_and_in_the_graphs_order() -> None:
    for worst, code, order, events in spawn(inductor_jobs.run, 2, args=(-1, {}), timeout=240):
        assert worst <= CLOSE
        assert "torch.ops.fx_fusion" not in code[code.index("def call(") :]
        assert events == []
        assert sorted(order) == ["all_reduce", "site", "site"]
        assert collectives(code) == order


def test_a_static_and_a_dynamic_rank_meet_in_the_same_collectives() -> None:
    static, dynamic = spawn(inductor_jobs.run, 2, args=(1, {}, True), timeout=240)
    assert static[0] <= CLOSE
    assert dynamic[0] <= CLOSE
    assert collectives(static[1]) == collectives(dynamic[1])
    # this is the code for a GPU: a stream and the number of rows, then as on the CPU
    assert re.search(r"fx_fusion_site_\w+\(get_raw_stream\(\w+\), 4, None, None, ", static[1])
    assert re.search(r"fx_fusion_site_\w+\(get_raw_stream\(\w+\), s\d+, None, ", dynamic[1])


def test_results_are_planned_buffers_and_only_those_wanted() -> None:
    with fake_group(2), caches_left_alone():
        code = inductor_jobs.generated_code()
    call = code[code.index("def call(") :]
    (site,) = re.findall(r"fx_fusion_site_\w+\((.*)\)", call)
    norm, hidden, reduced, rstd = site.split(", ")[-4:]
    assert (reduced, rstd) == ("None", "None")
    for name in (norm, hidden):  # made empty or used again, before the call
        before = call[: call.index("fx_fusion_site")]
        assert re.search(rf"\b{name} = (empty_strided_cpu\(|buf\d+)", before)
    assert "empty_strided_cpu((0, )" not in call


@pytest.mark.parametrize(
    "options",
    [
        {"reorder_for_compute_comm_overlap": True},
        {"reorder_for_locality": False, "max_fusion_size": 1},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_schedules_are_right(options: dict[str, object]) -> None:
    for worst, *_ in spawn(inductor_jobs.run, 2, args=(-1, options), timeout=400):
        assert worst <= CLOSE

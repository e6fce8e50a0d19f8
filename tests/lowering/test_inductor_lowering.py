"""The op in Inductor's generated code: called directly, in the graph's order of collectives."""

from __future__ import annotations

import re

import inductor_jobs
import pytest

from fx_fusion.testing import spawn

#: fp32; the norm adds up its squares in another order than eager.
CLOSE = 4e-6


def collectives(code: str) -> list[str]:
    """The collectives of generated code in the order they are called."""
    call = code[code.index("def call(") :]
    found = re.findall(r"= (fx_fusion_site)_\w+\(|(all_reduce_)\.default\(", call)
    return ["site" if site else "all_reduce" for site, plain in found if site or plain]


def test_sites_are_called_directly_and_in_the_graphs_order() -> None:
    for worst, code, order in spawn(inductor_jobs.run, 2, args=(-1, {}), timeout=240):
        assert worst <= CLOSE
        assert not re.search(r"torch\.ops\.fx_fusion\.\w+\.default\(", code)
        assert sorted(order) == ["all_reduce", "site", "site"]
        assert collectives(code) == order


def test_a_static_and_a_dynamic_rank_meet_in_the_same_collectives() -> None:
    static, dynamic = spawn(inductor_jobs.run, 2, args=(1, {}), timeout=240)
    assert static[0] <= CLOSE
    assert dynamic[0] <= CLOSE
    assert collectives(static[1]) == collectives(dynamic[1])


@pytest.mark.parametrize(
    "options",
    [
        {"reorder_for_compute_comm_overlap": True},
        {"reorder_for_locality": False, "max_fusion_size": 1},
        {"cpp_wrapper": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_schedules_and_wrappers_are_right(options: dict[str, object]) -> None:
    for worst, *_ in spawn(inductor_jobs.run, 2, args=(-1, options), timeout=400):
        assert worst <= CLOSE

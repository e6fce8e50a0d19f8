"""Sites that add up in their x, and those whose x somebody else reads."""

from __future__ import annotations

from typing import Any

import x_memory_jobs as jobs

from fx_fusion.testing import spawn


def test_only_a_gemm_s_result_that_nobody_else_reads_is_overwritten() -> None:
    expected: dict[str, Any] = {
        model.__name__: (sites, []) for model, sites in jobs.CASES.items()
    }
    assert spawn(jobs.every_case, 2, timeout=240) == [expected, expected]


def test_the_group_s_all_reduce_is_in_place_there() -> None:
    seen = ["_c10d_functional::all_reduce_ 2"]
    assert spawn(jobs.collectives, 2, timeout=120) == [seen, seen]

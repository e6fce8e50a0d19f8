"""compile_on_one_rank: graphs that don't bake the group stay right; those that name it are fused."""

from __future__ import annotations

import one_rank_jobs

from fx_fusion.report import Reason
from fx_fusion.testing import spawn


def test_a_site_is_right_whichever_way_its_group_is_given() -> None:
    for ways in spawn(one_rank_jobs.sites, 2, timeout=150):
        assert {way: right for way, (right, _) in ways.items()} == dict.fromkeys(ways, True)
        reports = {way: report for way, (_, report) in ways.items()}
        assert reports.pop("name").fused
        for way, report in reports.items():  # torch 2.11 bakes the name of these too
            assert report.fused or report.reason is Reason.GROUP_IS_NODE, way

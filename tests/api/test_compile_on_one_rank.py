"""compile_on_one_rank: graphs that don't bake the group stay right; those that name it are fused."""

from __future__ import annotations

import one_rank_jobs
import pytest
import torch

from fx_fusion.report import Reason, SiteReport
from fx_fusion.testing import spawn


def reports(*ways: str) -> dict[str, SiteReport]:
    """The reports of the site by how its group is given, if its results are right."""
    found = {}
    for results in spawn(one_rank_jobs.sites, 2, timeout=150, args=(ways,)):
        assert {way: right for way, (right, _) in results.items()} == dict.fromkeys(ways, True)
        found = {way: report for way, (_, report) in results.items()}
    return found


def test_a_site_whose_group_is_named_is_right_and_fused() -> None:
    assert reports("name")["name"].fused


@pytest.mark.skipif(
    torch.__version__.startswith("2.12."),
    reason="torch 2.12's Inductor lowers no all_reduce whose group is an object",
)
def test_a_site_whose_group_is_an_object_is_right() -> None:
    for way, report in reports("group", "mesh").items():  # torch 2.11 bakes the name of these
        assert report.fused or report.reason is Reason.GROUP_IS_NODE, way

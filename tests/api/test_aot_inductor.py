"""A package made by AOTInductor: the fused graph runs in processes that import fx_fusion.ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aot_support
import pytest
import torch

from fx_fusion import FusionReport
from fx_fusion.compiled import PACKAGE_KEY
from fx_fusion.testing import fake_group

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A package that was compiled in this process alone, and what two ranks made of it."""
    folder: Path = tmp_path_factory.mktemp("package")
    expected = aot_support.write_calls(folder, WORLD_SIZE, tokens=(4, 1, 9, 4))
    with fake_group(WORLD_SIZE):
        aot_support.compile_package(folder / "model.pt2", "cpu", is_dynamic=True)
    ranks = aot_support.run_package(folder, WORLD_SIZE, "cpu")
    code = aot_support.code_of(folder / "model.pt2")
    return {"expected": expected, "ranks": ranks, "code": code}


def test_the_fused_graph_runs_on_real_ranks(package: dict[str, Any]) -> None:
    assert aot_support.differences(package["ranks"], package["expected"]) == []


def test_without_the_import_the_error_names_the_package_to_import(
    package: dict[str, Any],
) -> None:
    for rank in package["ranks"]:
        assert "import_fx_fusion.ops" in rank["refused"]


def test_sites_are_called_without_the_dispatcher(package: dict[str, Any]) -> None:
    assert package["code"].count("fx_fusion_call(") == 2
    assert "proxy_executor_call" not in package["code"]
    assert "all_reduce" not in package["code"]


def test_the_report_travels_in_the_package(package: dict[str, Any]) -> None:
    for rank in package["ranks"]:
        report = FusionReport.from_json(rank["metadata"][PACKAGE_KEY])
        assert (report.fused_count, report.site_count) == (2, 2)
        assert [site.world_size for site in report.sites] == [2, 2]
    # and stays out of what is packaged next
    assert PACKAGE_KEY not in torch._inductor.config.aot_inductor.metadata

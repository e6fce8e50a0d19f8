"""Every architecture of the zoo, captured in one process under a fake group of two ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import BY_NAME, ZOO, Architecture
from zoo_support import WORLD_SIZE, inputs, load, save

from fx_fusion.explain import captured_call
from fx_fusion.report import FusionReport, Reason
from fx_fusion.testing import fake_group


@dataclass(frozen=True)
class Captured:
    """What the pass makes of a model.

    Attributes:
        report: The report `fx_fusion.explain` gives.
        all_reduces: How many all_reduces the rewritten graphs still have.
        fused_ops: How many fused ops they have.
    """

    report: FusionReport
    all_reduces: int
    fused_ops: int


def capture(model: Any, given: Mapping[str, Any], **settings: Any) -> Captured:
    """What `fx_fusion.explain` sees of an inference call, and counts in the graphs it leaves."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # transformers' and Inductor's, on every MoE model
        seen, incomplete = captured_call(model, settings, (), given, text="after")
    graphs = tuple(graph.report for graph in seen.graphs if graph.report is not None)
    text = "\n".join(graph.text for graph in seen.graphs)
    return Captured(
        report=FusionReport(graphs, incomplete),
        all_reduces=len(re.findall(r"\ball_reduce\(", text)),
        fused_ops=len(re.findall(r"\ball_reduce_add_rms_norm\(", text)),
    )


def captured(architecture: Architecture, directory: Path, **settings: object) -> Captured:
    """What the pass makes of the architecture in bf16, with all its casts."""
    save(architecture, str(directory))
    with fake_group(WORLD_SIZE):
        model = load(architecture, str(directory), torch.bfloat16)
        return capture(model, inputs(architecture), **settings)


def unfused(report: FusionReport) -> dict[str, Reason | None]:
    """Why each site that isn't fused is not, by the path of its module."""
    return {site.module: site.reason for site in report.sites if not site.fused}


@pytest.mark.parametrize("architecture", ZOO, ids=lambda row: row.name)
def test_sites_and_reasons_are_those_derived_from_the_models_code(
    architecture: Architecture, tmp_path: Path
) -> None:
    seen = captured(architecture, tmp_path)
    report = seen.report
    assert not report.incomplete
    assert [graph.kind for graph in report.graphs] == ["inference"]
    assert report.site_count == architecture.sites
    assert report.fused_count == architecture.fused
    assert unfused(report) == architecture.unfused
    steps = {step for site in report.sites if site.fused for step in site.steps}
    assert steps == set(architecture.steps)
    assert seen.all_reduces == architecture.sites - architecture.fused
    assert seen.fused_ops == architecture.fused


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_merging_all_reduces_fuses_routed_and_shared_experts_into_one_op(
    name: str, tmp_path: Path
) -> None:
    architecture = BY_NAME[name]
    assert list(architecture.unfused.values()) == [Reason.SUMMED_ALL_REDUCES] * 2

    seen = captured(architecture, tmp_path, merge_all_reduces=True)

    # The two sums of layer 1 become one all_reduce, which fuses: both count as fused, in one op.
    assert seen.report.site_count == architecture.sites
    assert seen.report.fused_count == architecture.sites
    assert seen.all_reduces == 0
    assert seen.fused_ops == architecture.sites - 1


@pytest.mark.parametrize("name", ["cohere", "llama4", "qwen2_moe"])
def test_merging_all_reduces_fuses_nothing_where_the_reason_is_another(
    name: str, tmp_path: Path
) -> None:
    architecture = BY_NAME[name]
    seen = captured(architecture, tmp_path, merge_all_reduces=True)
    assert seen.report.fused_count == architecture.fused
    assert unfused(seen.report) == architecture.unfused


def test_the_zoo_has_every_architecture_once_and_its_numbers_add_up() -> None:
    assert len(BY_NAME) == len(ZOO) >= 26
    for row in ZOO:
        assert row.sites == row.fused + len(row.unfused), row.name

"""The choice of a kernel: pure, stable, and refusing by a Reason with its numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fx_fusion.lowering.select import TABLE, Plan, Problem, Refusal, Row, digest_of, select
from fx_fusion.report import REMEDIES, Reason
from fx_fusion.settings import FusionSettings

PROBLEM = Problem(
    hidden_size=2880,
    dtype=torch.bfloat16,
    world_size=2,
    arch="sm_90",
    tokens=None,
    deterministic=False,
)
ROW = Row(
    kernel="one_shot",
    arch="sm_90",
    world_size=2,
    dtype="bfloat16",
    hidden_size=2880,
    max_tokens=64,
    machine="an example, not a measurement",
    date="2000-01-01",
    command="none",
)


@pytest.mark.parametrize("kernel", ["auto", "unfused"])
@pytest.mark.parametrize("arch", ["cpu", "sm_80", "gfx942"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_problem_gets_the_unfused_path(
    kernel: str, arch: str, deterministic: bool
) -> None:
    problem = replace(PROBLEM, arch=arch, deterministic=deterministic, hidden_size=63)
    plan = select(problem, FusionSettings(kernel=kernel))
    assert isinstance(plan, Plan)
    assert plan.kernel == "unfused"
    assert re.fullmatch(f"{kernel}-[0-9a-f]{{12}}", plan.digest)


def test_a_kernel_that_does_not_exist_is_refused_with_the_numbers() -> None:
    refusal = select(PROBLEM, FusionSettings(kernel="flashinfer"))
    assert refusal == Refusal(
        Reason.KERNEL_UNAVAILABLE,
        {
            "kernel": "flashinfer",
            "cause": "not supported yet",
            "arch": "sm_90",
            "world_size": 2,
            "dtype": "bfloat16",
            "hidden_size": 2880,
        },
    )
    assert 'kernel="auto"' in REMEDIES[refusal.reason]


def test_static_and_dynamic_tokens_get_the_same_plan() -> None:
    settings = FusionSettings()
    assert select(replace(PROBLEM, tokens=1), settings) == select(PROBLEM, settings)


def test_the_digest_follows_the_table_and_the_settings_that_choose() -> None:
    settings = FusionSettings()
    assert digest_of(settings) == digest_of(FusionSettings(merge_all_reduces=True))
    assert digest_of(settings) == digest_of(FusionSettings(deterministic=True))
    others = {
        digest_of(settings),
        digest_of(FusionSettings(kernel="unfused")),
        digest_of(settings, (ROW,)),
        digest_of(settings, (replace(ROW, max_tokens=65),)),
    }
    assert len(others) == 4


def test_every_row_of_the_table_says_where_its_number_comes_from() -> None:
    for row in TABLE:
        assert row.max_tokens > 0
        assert all((row.machine, row.command))
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", row.date)

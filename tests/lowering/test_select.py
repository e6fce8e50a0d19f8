"""The choice of a kernel: pure, stable, and refusing by a Reason with its numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fx_fusion.lowering.gpu_select import TABLE, Row
from fx_fusion.lowering.select import Plan, Problem, Refusal, digest_of, kernel_of, select
from fx_fusion.lowering.site_form import SiteForm
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


@pytest.mark.parametrize(
    ("kernel", "arch", "deterministic"),
    # a sum in rank order is the op's even where no kernel runs
    [("auto", "sm_80", True), ("auto", "gfx942", True)]
    + [
        ("unfused", arch, flag) for arch in ("cpu", "sm_80", "gfx942") for flag in (True, False)
    ],
)
def test_the_unfused_path_is_planned_where_it_is_asked_for_or_needed(
    kernel: str, arch: str, deterministic: bool
) -> None:
    problem = replace(PROBLEM, arch=arch, deterministic=deterministic, hidden_size=63)
    plan = select(problem, FusionSettings(kernel=kernel))
    assert isinstance(plan, Plan)
    assert plan.kernel == "unfused"
    assert re.fullmatch(f"{kernel}-[0-9a-f]{{12}}", plan.digest)


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
@pytest.mark.parametrize("tokens", [1, None])
def test_a_graph_stays_as_it_is_where_no_kernel_was_measured(
    arch: str, tokens: int | None
) -> None:
    refusal = select(replace(PROBLEM, arch=arch, tokens=tokens), FusionSettings())
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NOT_FASTER
    assert arch in str(refusal.numbers["cause"])
    assert refusal.numbers.get("tokens") == tokens
    assert 'kernel="fx_fusion"' in REMEDIES[refusal.reason]


@pytest.mark.parametrize("kernel", ["auto", "fx_fusion"])
@pytest.mark.parametrize(
    ("world_size", "tokens", "expected"),
    [
        (2, 4096, "one-shot over shared memory"),
        (3, 1, "one-shot over shared memory"),
        (3, 4096, "two-shot over shared memory"),
        (3, None, "one-shot over shared memory or two-shot"),
    ],
)
def test_a_cpu_site_runs_over_shared_memory(
    kernel: str, world_size: int, tokens: int | None, expected: str
) -> None:
    problem = replace(PROBLEM, arch="cpu", world_size=world_size, tokens=tokens)
    plan = select(problem, FusionSettings(kernel=kernel))
    assert isinstance(plan, Plan)
    assert (plan.kernel, plan.cause) == (expected, "")


def test_a_row_that_fits_no_slot_and_a_machine_without_compiler_say_so() -> None:
    wide = select(replace(PROBLEM, arch="cpu", hidden_size=2**20), FusionSettings())
    assert isinstance(wide, Refusal)
    assert wide.reason is Reason.NOT_FASTER
    assert wide.numbers["cause"] == "a row of 1048576 elements doesn't fit a slot"
    bare = replace(PROBLEM, arch="cpu", local_cause="no C++ compiler was found")
    plan = select(bare, FusionSettings())
    assert isinstance(plan, Plan)
    assert (plan.kernel, plan.cause) == ("unfused", "no C++ compiler was found")
    refusal = select(bare, FusionSettings(kernel="fx_fusion"))
    assert isinstance(refusal, Refusal)
    assert refusal.numbers["cause"] == "no C++ compiler was found"


def test_a_kernel_that_cannot_run_is_refused_with_the_numbers() -> None:
    refusal = select(PROBLEM, FusionSettings(kernel="aiter"))
    assert refusal == Refusal(
        Reason.KERNEL_UNAVAILABLE,
        {
            "kernel": "aiter",
            "cause": "AITER's fused kernels are for AMD's gfx9, not sm_90",
            "arch": "sm_90",
            "world_size": 2,
            "dtype": "bfloat16",
            "hidden_size": 2880,
        },
    )
    assert 'kernel="auto"' in REMEDIES[refusal.reason]


def test_another_library_s_kernel_is_planned_where_a_release_of_it_can() -> None:
    settings = FusionSettings(kernel="flashinfer")
    plan = select(PROBLEM, settings)
    assert isinstance(plan, Plan)
    assert plan.kernel.startswith("FlashInfer")
    assert kernel_of(plan.digest) == "flashinfer"
    form = SiteForm(torch.bfloat16, torch.bfloat16, bias=True)
    refusal = select(replace(PROBLEM, form=form), settings)
    assert isinstance(refusal, Refusal)
    assert "bias" in str(refusal.numbers["cause"])


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

"""kernel="flashinfer" and "aiter" as settings: what a report says of each site."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fx_fusion
from fx_fusion import Target
from fx_fusion.report import Reason
from fx_fusion.testing import fake_group

BF16 = torch.bfloat16
HIDDEN = 1024


def reduced(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, funcol).all_reduce(x, "sum", dist.group.WORLD))


def rounds_last(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = residual + reduced(x)
    return torch.nn.functional.rms_norm(hidden, (HIDDEN,), weight, 1e-6), hidden


def rounds_first(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = residual + reduced(x)
    h = hidden.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(BF16), hidden


def biased(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = residual + (reduced(x) + weight)
    return torch.nn.functional.rms_norm(hidden, (HIDDEN,), weight, 1e-6), hidden


def reduced_alone(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    value = reduced(x)
    hidden = residual + value
    return torch.nn.functional.rms_norm(hidden, (HIDDEN,), weight, 1e-6), hidden, value


def site_of(function: Any, kernel: str, arch: str) -> Any:
    inputs = (torch.empty(8, HIDDEN), torch.empty(8, HIDDEN), torch.empty(HIDDEN))
    with fake_group(world_size=2), torch.no_grad():
        explained = fx_fusion.explain(function, target=Target(arch=arch), kernel=kernel)
        (site,) = explained(*(value.to(BF16) for value in inputs)).sites
    return site


@pytest.mark.parametrize(
    ("kernel", "arch", "name"),
    [("flashinfer", "sm_90", "FlashInfer's"), ("aiter", "gfx942", "AITER's")],
)
def test_a_site_that_the_library_computes_is_fused_and_the_report_names_the_library(
    kernel: str, arch: str, name: str
) -> None:
    site = site_of(rounds_last, kernel, arch)
    assert site.reason is None
    assert site.kernel.startswith(name)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (rounds_first, "the graph rounds first"),
        (biased, "no bias"),
        (reduced_alone, "doesn't return the reduced value"),
    ],
)
def test_a_site_that_it_computes_otherwise_stays_as_it_is_with_the_cause(
    function: Any, says: str
) -> None:
    site = site_of(function, "flashinfer", "sm_90")
    assert site.reason is Reason.KERNEL_UNAVAILABLE
    assert says in site.numbers["cause"]


def test_another_machine_s_library_is_refused_by_architecture() -> None:
    site = site_of(rounds_last, "flashinfer", "gfx942")
    assert "sm_90 or newer, not gfx942" in site.numbers["cause"]

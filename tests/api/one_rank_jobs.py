"""Ranks that compile with torch's compile_on_one_rank: one site, its group given in three ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compile_support import HIDDEN, QUICK, inputs
from torch.distributed.device_mesh import init_device_mesh

import fx_fusion
from fx_fusion.report import SiteReport

#: The largest difference from eager, which sums the squares in another order.
CLOSE = 1e-5


def switch_on() -> None:
    """Set the option, which has moved between torch's releases."""
    import torch.compiler.config as newer
    import torch.distributed.config as older

    config: Any = newer if hasattr(newer, "compile_on_one_rank") else older
    config.compile_on_one_rank = True


def sites(
    rank: int, world_size: int, ways: tuple[str, ...]
) -> dict[str, tuple[bool, SiteReport]]:
    """For each of the ways: whether the result is eager's, and the report of the one site."""
    switch_on()
    mesh = init_device_mesh("cpu", (world_size,))
    groups: dict[str, Any] = {
        "name": mesh.get_group().group_name,
        "group": dist.group.WORLD,
        "mesh": mesh,
    }
    return {way: site(rank, groups[way]) for way in ways}


def site(rank: int, group: Any) -> tuple[bool, SiteReport]:
    """One of them."""

    def layer(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = residual + funcol.all_reduce(x, "sum", group)
        return torch.nn.functional.rms_norm(hidden, (HIDDEN,), weight, 1e-6), hidden

    torch._dynamo.reset()
    fx_fusion.clear_reports()
    x, residual, weight = inputs()
    x = x + rank
    with torch.no_grad():
        compiled = torch.compile(layer, backend="fx_fusion", options=QUICK)
        given, expected = compiled(x, residual, weight), layer(x, residual, weight)
    right = all(
        float((a - b).abs().max()) < CLOSE for a, b in zip(given, expected, strict=True)
    )
    (report,) = fx_fusion.FusionReport.merged(fx_fusion.reports()).sites
    return right, report

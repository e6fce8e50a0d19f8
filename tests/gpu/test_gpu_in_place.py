"""Residuals that are written to in place, on real ranks: the bits of sites that leave them."""

from __future__ import annotations

import gpu_in_place_jobs as jobs
import pytest
import torch

from fx_fusion.testing import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
]

RANKS = 2


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("default", (8, 600)), ("reduce-overhead", (8, 3))],
    ids=["default", "reduce-overhead"],
)
def test_a_compiled_model(mode: str, sizes: tuple[int, ...], side_by_side: None) -> None:
    for wrong, place, plain in spawn(
        jobs.model_two_ways, RANKS, device="cuda", timeout=150, args=(mode, sizes)
    ):
        print(f"{mode}: {place} bytes at most in place, {plain} not in place")
        assert wrong == []
        assert mode != "default" or place <= plain  # a graph's memory is its pool's


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_op(world_size: int, side_by_side: None) -> None:
    assert spawn(jobs.the_op, world_size, device="cuda", timeout=200) == [[]] * world_size

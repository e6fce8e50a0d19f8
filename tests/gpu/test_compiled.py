"""Compiled models on real ranks: code without the dispatcher, under CUDA graphs and without."""

from __future__ import annotations

import compiled_jobs
import pytest
import torch

from fx_fusion.testing import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
]

RANKS = 2
#: (mode or "cpp_wrapper", tokens of the captured sizes, dynamic sizes, calls)
CASES = (
    ("default", (8, 3, 33), True, 300),
    ("cpp_wrapper", (8, 3, 33), True, 300),
    ("reduce-overhead", (8,), False, 2000),
    ("reduce-overhead", (8, 3, 33), True, 600),
    ("max-autotune-no-cudagraphs", (8,), False, 200),
    ("max-autotune", (8,), False, 200),
)


@pytest.mark.parametrize(
    ("mode", "sizes", "dynamic", "calls"),
    CASES,
    ids=[f"{case[0]}-{len(case[1])}" for case in CASES],
)
def test_a_compiled_model(
    mode: str, sizes: tuple[int, ...], dynamic: bool, calls: int, side_by_side: None
) -> None:
    results = spawn(
        compiled_jobs.compiled_model,
        RANKS,
        device="cuda",
        timeout=240 if mode.startswith(("max", "cpp")) else 150,
        args=(mode, sizes, dynamic, calls),
    )
    assert results == [[]] * RANKS


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="each rank needs a GPU")
def test_a_cold_first_call_under_graphs() -> None:
    job = compiled_jobs.cold_first_call
    results = spawn(job, RANKS, device="cuda", timeout=150, args=("reduce-overhead",))
    assert results == [[]] * RANKS

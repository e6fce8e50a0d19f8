"""The op called from compiled code, cold: the first thing that a fresh process does."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from op_support import bits, part, shared

from fx_fusion.ops import all_reduce_add_rms_norm
from fx_fusion.testing import spawn


def step(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    """Two fused sites, the first fed by compiled code and the second by the first."""
    norm, residual, _, _ = all_reduce_add_rms_norm(
        -x, residual, weight, None, 1e-6, "0", 2, want_residual=True, norm_dtype=x.dtype
    )
    return all_reduce_add_rms_norm(
        norm, residual, weight, None, 1e-5, "0", 2, want_residual=True, deterministic=True
    )[:2]


def compiled_cold(rank: int, world_size: int) -> list[str]:
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
        # Ranks needn't compile alike: one static, one dynamic.
        compiled = torch.compile(step, fullgraph=True, dynamic=rank == 1)
        for tokens in (4, 7):
            tensors = (part(rank, tokens, 64), shared(tokens, 64), shared(64, seed=2))
            for name, given, expected in zip(
                ("norm", "residual"), compiled(*tensors), step(*tensors), strict=True
            ):
                if not torch.equal(bits(given), bits(expected)):
                    failed.append(f"{tokens} tokens: {name} differs from eager")
    return failed


def test_a_cold_compiled_call_equals_eager() -> None:
    assert spawn(compiled_cold, 2, timeout=180) == [[], []]

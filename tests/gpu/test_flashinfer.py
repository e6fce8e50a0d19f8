"""kernel="flashinfer" on a GPU: the library's own kernels give the contract's numbers."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from gpu_foreign_jobs import flashinfer_against_reference

from fx_fusion.testing import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
    pytest.mark.usefixtures("side_by_side"),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="FlashInfer isn't installed"
    ),
]


def test_flashinfer_matches_the_reference_eagerly_and_in_graphs() -> None:
    for lines in spawn(flashinfer_against_reference, 2, device="cuda", timeout=400):
        assert lines == []

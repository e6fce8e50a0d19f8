"""The package of AOTInductor on GPUs: two ranks, which share one where there is only one."""

from __future__ import annotations

import os
from pathlib import Path

import aot_support
import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

from fx_fusion import FusionReport
from fx_fusion.compiled import PACKAGE_KEY
from fx_fusion.testing import fake_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
]


@pytest.mark.skipif(CUDA_HOME is None, reason="AOTInductor needs the CUDA toolkit's headers")
def test_the_fused_graph_runs_on_real_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch links with -lcuda, and where only the driver is installed that is the toolkit's stub
    stubs = Path(str(CUDA_HOME)) / "lib64" / "stubs"
    before = os.environ.get("LIBRARY_PATH")
    monkeypatch.setenv("LIBRARY_PATH", f"{stubs}:{before}" if before else str(stubs))
    expected = aot_support.write_calls(tmp_path, 2)
    with fake_group(2):
        aot_support.compile_package(tmp_path / "model.pt2", "cuda", kernel="fx_fusion")
    ranks = aot_support.run_package(tmp_path, 2, "cuda")
    assert aot_support.differences(ranks, expected) == []
    for rank in ranks:
        assert "import_fx_fusion.ops" in rank["refused"]
        report = FusionReport.from_json(rank["metadata"][PACKAGE_KEY])
        assert (report.fused_count, report.site_count) == (2, 2)

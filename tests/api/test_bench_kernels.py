"""The kernels benchmark's table and its command line, without a GPU."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from fx_fusion.bench.common import plain
from fx_fusion.bench.kernels import Cell, main, table


def test_the_table_shows_medians_spread_and_how_often_faster_ours_is() -> None:
    cells = [
        Cell("fx_fusion", 2, 8, 4096, "bfloat16", 4.0, 3.9, 4.2),
        Cell("unfused copy", 2, 8, 4096, "bfloat16", 10.0, 9.5, 11.0),
        Cell("fx_fusion", 2, 64, 4096, "bfloat16", 5.0, 5.0, 5.0),
        Cell("unfused copy", 2, 64, 4096, "bfloat16", 4.0, 4.0, 4.0),
    ]
    shown = table(cells, Namespace(world_size=2, dtype="bfloat16", rounds=15))
    first, second = shown.lines
    assert shown.header == ("tokens", "hidden", "fx_fusion", "unfused copy")
    assert first == ("8", "4096", "4.00 (3.9-4.2)", "10.00 (9.5-11.0) 2.50x")
    assert second[-1].endswith("0.80x")
    assert "4.00 (3.9-4.2)  10.00 (9.5-11.0) 2.50x" in plain(shown)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err

"""The kernels benchmark's table and its command line, without a GPU."""

from __future__ import annotations

import pytest
import torch

from fx_fusion.bench.kernels import Cell, main, table


def test_the_table_shows_medians_spread_and_how_often_faster_ours_is() -> None:
    cells = [
        Cell("fx_fusion", 2, 8, 4096, "bfloat16", 4.0, 3.9, 4.2),
        Cell("unfused copy", 2, 8, 4096, "bfloat16", 10.0, 9.5, 11.0),
        Cell("fx_fusion", 2, 64, 4096, "bfloat16", 5.0, 5.0, 5.0),
        Cell("unfused copy", 2, 64, 4096, "bfloat16", 4.0, 4.0, 4.0),
    ]
    header, first, second = (
        [part.strip() for part in line.split("|")] for line in table(cells).splitlines()
    )
    assert header == ["tokens x hidden", "fx_fusion", "unfused copy"]
    assert first == ["8 x 4096", "4.00 (3.9-4.2)", "10.00 (9.5-11.0) 2.50x"]
    assert second[2].endswith("0.80x")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err

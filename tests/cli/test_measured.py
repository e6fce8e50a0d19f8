"""The measured savings that estimates rest on, and which layers count as repeated."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from fx_fusion import measured
from fx_fusion.cli import layers

RESULTS = Path(__file__).resolve().parents[2] / "examples" / "results"


def test_the_package_holds_the_cells_of_the_committed_results() -> None:
    rows = [
        row
        for ranks in (2, 3, 4)
        for row in csv.DictReader((RESULTS / f"cpu_site_{ranks}_ranks.csv").open())
    ]
    names = ("world_size", "dtype", "hidden", "tokens", "fused", "inductor", "machine", "date")
    committed = [["cpu", *(row[name] for name in names)] for row in rows]
    for ending in ("", "_wide", "_float16", "_float32"):
        found: dict[tuple[int, int], dict[str, dict[str, str]]] = {}
        for row in csv.DictReader((RESULTS / f"kernels_2_h200{ending}.csv").open()):
            cell = found.setdefault((int(row["hidden_size"]), int(row["tokens"])), {})
            cell[row["candidate"]] = row
        for (hidden, tokens), cell in sorted(found.items()):
            ours = cell["fx_fusion"]
            what = ["sm_90", "2", ours["dtype"], str(hidden), str(tokens)]
            if what in [line[:5] for line in committed]:  # measured twice: the first counts
                continue
            times = [ours["median"], cell["nccl"]["median"]]
            committed.append([*what, *times, ours["machine"], ours["date"]])
    held = []
    for c in measured.cells():
        numbers = [c.hidden_size, c.tokens, c.fused, c.unfused]
        held.append([c.arch, str(c.world_size), c.dtype, *map(str, numbers), c.machine, c.date])
    assert held == committed


@pytest.mark.parametrize(
    ("asked", "cell", "note"),
    [
        (("cpu", 2, "bfloat16", 4096, 64), (4096, 64), ""),
        (("cpu", 2, "bfloat16", 5120, 64), (4096, 64), "hidden size 4096 for 5120"),
        (("cpu", 2, "bfloat16", 4096, 100), (4096, 64), "64 tokens for 100"),
        (("cpu", 2, "bfloat16", 4096, 513), None, "513 tokens are outside"),
        (("cpu", 2, "bfloat16", 1024, 64), None, "1024 is too far from 2880"),
        (("cpu", 2, "float32", 4096, 64), None, "in bfloat16, not in float32"),
        (("cpu", 8, "bfloat16", 4096, 64), None, "with 2, 3 or 4 ranks, not with 8"),
        (("sm_90", 2, "bfloat16", 4096, 64), (4096, 64), ""),
        (("sm_90", 2, "float16", 8192, 8192), (8192, 8192), ""),
        (("sm_90", 8, "bfloat16", 4096, 64), None, "with 2 ranks, not with 8"),
        (("sm_80", 2, "bfloat16", 4096, 64), None, "nothing was measured for sm_80"),
    ],
)
def test_the_nearest_cell_is_taken_and_named_and_none_beyond_what_was_measured(
    asked: tuple[str, int, str, int, int], cell: tuple[int, int] | None, note: str
) -> None:
    found = measured.lookup(*asked)
    assert (found.cell and (found.cell.hidden_size, found.cell.tokens)) == cell
    assert note in found.note if note else found.note == ""


class Layer(nn.Module):
    def __init__(self, number: int, size: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.weight = nn.Linear(size, size)


def repeated(sizes: list[int], **config: object) -> tuple[int, int, int] | None:
    """Prefix, period and kept layers of a model with layers of these sizes."""
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(number, size) for number, size in enumerate(sizes))
    found = layers.repetition(model, SimpleNamespace(num_hidden_layers=len(sizes), **config))
    return None if found is None else (found.prefix, found.period, found.kept)


def test_layers_repeat_only_where_modules_and_the_config_s_lists_do() -> None:
    assert repeated([4] * 8) == (0, 1, 4)
    assert repeated([2, 2, 4, 4, 4, 4, 4, 4]) == (2, 1, 6)
    assert repeated([2, 4] * 6) == (0, 2, 8)
    assert repeated([4] * 12, layer_types=["a", "b"] * 6) == (0, 2, 8)
    assert repeated([4] * 4) is None
    assert repeated([4, 4, 4, 4, 4, 4, 4, 2]) is None
    assert repeated([4] * 8, layer_types=list("abcdefgh")) is None

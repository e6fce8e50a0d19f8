"""`fx-fusion plot`: what is drawn from each benchmark's CSV file, and what is refused."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fx_fusion.bench import common, cpu, cpu_step, pass_cost
from fx_fusion.bench.kernel_cells import Cell
from fx_fusion.bench.results import Picture, read
from fx_fusion.cli.app import app

RUNNER = CliRunner()
COMMITTED = Path(__file__).resolve().parents[2] / "examples" / "results"
CONDITIONS = {
    "torch": "2.13.0",
    "machine": "a machine",
    "cores": "2",
    "date": "2026-11-29",
    "command": "the command",
}
ROWS: dict[str, Sequence[Any]] = {
    "cpu-step": [
        cpu_step.Row(2, "bfloat16", 4, 2048, tokens, 9, 9, 30.0, 20.0, 10.0, 2.0)
        for tokens in (8, 1)
    ],
    "kernels": [
        Cell(name, 2, tokens, hidden, "bfloat16", median, median - 1, median + 1)
        for hidden in (2880, 4096)
        for tokens in (1, 64)
        for name, median in (("fx_fusion", 4.0), ("unfused", 10.0))
    ],
    "pass-cost": [pass_cost.Row(1, 2, 0.01, 2.0, 0.005), pass_cost.Row(8, 16, 0.1, 10.0, 0.01)],
}


def picture_of(bench: str, folder: Path) -> Picture:
    path = folder / f"{bench}.csv"
    common.write_csv(path, ROWS[bench], CONDITIONS | {"bench": bench})
    return read(path)


def test_the_committed_results_are_drawn_with_their_conditions_in_the_caption(
    tmp_path: Path,
) -> None:
    source = COMMITTED / "cpu_site_2_ranks.csv"
    target = tmp_path / "site.svg"
    done = RUNNER.invoke(app, ["plot", str(source), "-o", str(target), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["output"] == str(target)
    assert [title.split(",")[0] for title in document["panels"]] == [
        f"hidden size {size}" for size in cpu.HIDDEN_SIZES
    ]
    texts = " ".join(
        " ".join((element.text or "").split())
        for element in ElementTree.parse(target).iter("{http://www.w3.org/2000/svg}text")
    )
    for part in (
        "torch 2.13.0+cpu",
        "2 cores",
        "2026-11-29",
        "--world-size 2",
        "512",
        "tokens",
    ):
        assert part in texts
    again = tmp_path / "again.svg"
    assert RUNNER.invoke(app, ["plot", str(source), "-o", str(again)]).exit_code == 0
    assert again.read_bytes() == target.read_bytes()


def test_a_png_lies_beside_nothing_but_where_it_was_asked_for(tmp_path: Path) -> None:
    common.write_csv(tmp_path / "a.csv", ROWS["pass-cost"], CONDITIONS | {"bench": "pass-cost"})
    target = tmp_path / "b.png"
    done = RUNNER.invoke(app, ["plot", str(tmp_path / "a.csv"), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert target.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.png"]


def test_a_panel_a_hidden_size_with_ours_first_and_its_ratio_to_each_other(
    tmp_path: Path,
) -> None:
    picture = picture_of("kernels", tmp_path)
    assert [panel.title for panel in picture.panels] == [
        "hidden size 2880, bfloat16, 2 ranks",
        "hidden size 4096, bfloat16, 2 ranks",
    ]
    ours, other = picture.panels[0].times
    assert (ours.name, ours.x, ours.y, ours.low) == (
        "fx_fusion",
        (1.0, 64.0),
        (4.0, 4.0),
        (3.0, 3.0),
    )
    assert other.name == "unfused"
    assert [(line.name, line.y) for line in picture.panels[0].ratios] == [
        ("unfused / fx_fusion", (2.5, 2.5))
    ]
    assert picture.caption == "torch 2.13.0, a machine, 2 cores, 2026-11-29: the command"


def test_variants_of_one_candidate_are_a_line_of_the_fastest_at_each_size(
    tmp_path: Path,
) -> None:
    cells = [
        Cell(name, 2, tokens, 4096, "bfloat16", median, median, median, between=between)
        for name, tokens, median, between in (
            ("fx_fusion", 1, 4.0, "nothing"),
            ("fx_fusion", 1, 1.0, "GEMMs, L2 cold"),
            ("fx_fusion two-shot", 1, 5.0, "nothing"),
            ("flashinfer one-shot", 1, 6.0, "nothing"),
            ("flashinfer one-shot pdl", 1, 5.0, "nothing"),
            ("flashinfer one-shot", 64, 7.0, "nothing"),
            ("flashinfer one-shot pdl", 64, math.nan, "nothing"),
            ("fx_fusion", 64, 5.0, "nothing"),
        )
    ]
    path = tmp_path / "kernels.csv"
    common.write_csv(path, cells, CONDITIONS | {"bench": "kernels"})
    (panel,) = read(path).panels
    assert [(line.name, line.y) for line in panel.times] == [
        ("fx_fusion", (4.0, 5.0)),
        ("FlashInfer, best variant", (5.0, 7.0)),
    ]


def test_points_are_in_the_order_of_tokens_and_shares_are_percent(tmp_path: Path) -> None:
    assert picture_of("cpu-step", tmp_path).panels[0].times[0].x == (1.0, 8.0)
    assert picture_of("pass-cost", tmp_path).panels[0].ratios[0].y == (0.5, 1.0)


def test_a_file_without_conditions_is_drawn_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text("layers,sites,pass_seconds,compile_seconds,share\n1,2,0.1,2.0,0.05\n")
    assert read(path).caption == "The file doesn't say on what it was measured."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read"),
        ("", "has no rows"),
        ("a,b\n1,2\n", "has ['a', 'b']"),
        ("bench,tokens\nkernels,1\n", "lacks the columns candidate, hidden_size"),
        ("layers,pass_seconds,compile_seconds,share\n1,x,2,3\n", "no figure"),
    ],
)
def test_a_file_that_is_no_benchmark_s_is_refused_with_what_is_wrong(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "wrong.csv"
    if content is not None:
        path.write_text(content)
    done = RUNNER.invoke(app, ["plot", str(path)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert not path.with_suffix(".svg").exists()


def test_a_picture_of_another_kind_than_offered_is_refused(tmp_path: Path) -> None:
    source = str(COMMITTED / "cpu_site_2_ranks.csv")
    done = RUNNER.invoke(app, ["plot", source, "-o", str(tmp_path / "a.csv")])
    assert done.exit_code == 2
    assert ".svg, .png, .pdf" in done.stderr

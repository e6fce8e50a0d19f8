"""The decode benchmark: a small run on the CPU, its table, and what it refuses."""

from __future__ import annotations

import pickle
import signal
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fx_fusion.bench import common, decode, results
from fx_fusion.bench.decode import BENCH, Row, ours_beside, table
from fx_fusion.bench.decode_models import SHAPES
from fx_fusion.bench.decode_rank import Job, Measured
from fx_fusion.errors import SpawnError

ROW = Row(
    "gpt-oss-20b",
    "inductor graph",
    *(2, 8, 2880, 4, 1024, "bfloat16"),
    *(150.0, 148.0, 155.0, 9.0, 7.5, 0.25),
    *(0, 0, 0.004, True),
)
ROWS = (
    replace(ROW, candidate="inductor", median=600.0, host=580.0),
    ROW,
    replace(ROW, candidate="fx_fusion", median=300.0, host=290.0, sites=8, fused_sites=8),
    replace(ROW, candidate="fx_fusion graph", median=120.0, sites=8, fused_sites=8),
)


def options_of(*words: str) -> Namespace:
    return common.parser_of(BENCH, "").parse_args(list(words))


def test_a_small_run_on_the_cpu_compares_the_candidates_with_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # without a trial of vector code, C++ compiles sooner
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    small = ("--layers", "1", "--cache-length", "8", "--rounds", "2", "--tokens", "3")
    rows = BENCH.run(options_of("--device", "cpu", "--shapes", "tiny", *small), "")
    assert [row.candidate for row in rows] == ["eager", "inductor", "fx_fusion"]
    eager, inductor, fused = rows
    assert (fused.fused_sites, fused.sites) == (2, 2)
    assert fused.same_on_ranks
    # without the roundings Inductor leaves out, but by no more than those
    assert 0 < fused.difference < 0.02
    assert eager.difference == eager.compile_seconds == 0
    assert min(inductor.compile_seconds, fused.compile_seconds) > 0
    assert all(0 < row.low <= row.median <= row.high for row in rows)


@pytest.mark.parametrize("cause", ["rank 1 was lost", "SIGTERM"])
def test_what_was_measured_before_a_failure_is_shown_with_it_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cause: str
) -> None:
    def spawn(function: object, world_size: int, *, args: tuple[Job], **_: object) -> None:
        ours = {"fx_fusion": Measured(step=[2.0, 3.0, 4.0], host=[1.0, 1.0, 1.0])}
        with open(args[0].results, "wb") as file:
            pickle.dump([ours] * world_size, file)
        if cause == "SIGTERM":  # as `timeout` sends it
            signal.raise_signal(signal.SIGTERM)
        raise SpawnError(cause)

    monkeypatch.setattr(decode, "spawn", spawn)
    path = tmp_path / "decode.csv"
    words = ["--device", "cpu", "--shapes", "tiny", "--tokens", "5,6", "--csv", str(path)]
    with pytest.raises(SpawnError, match=rf"(?s){cause}.*before that.*3\.0 \(2\.5-3\.5"):
        common.main(BENCH, words)
    assert [line.split(",")[:4] for line in path.read_text().splitlines()[1:]] == [
        ["tiny", "fx_fusion", "2", "5"]
    ]


def test_graphs_are_set_against_graphs_and_plain_steps_against_plain_steps() -> None:
    beside = [ours_beside(row, ROWS).candidate for row in ROWS]
    assert beside == ["fx_fusion", "fx_fusion graph", "fx_fusion", "fx_fusion graph"]
    shown = table(ROWS, options_of("--shapes", "gpt-oss-20b"))
    by_name = {line[2]: dict(zip(shown.header, line, strict=True)) for line in shown.lines}
    assert by_name["inductor graph"]["x"] == "1.25x"
    assert by_name["inductor graph"]["us a step"] == "150.0 (148.0-155.0)"
    assert by_name["inductor"]["x"] == "2.00x"
    assert by_name["inductor"]["host us"] == "580 2.00x"
    assert by_name["fx_fusion"]["fused"] == "8/8"
    assert by_name["fx_fusion"]["x"] == ""


def test_the_shapes_split_over_2_and_4_ranks() -> None:
    for size in (2, 4):
        assert decode.cannot(options_of("--device", "cpu", "--world-size", str(size))) == ""
    assert {shape.hidden_size for shape in SHAPES.values()} == {2880, 4096, 5120, 7168, 64}


def test_what_it_cannot_run_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cause = decode.cannot(options_of("--device", "cpu", "--world-size", "3"))
    assert cause.startswith("--world-size 3 doesn't divide the 8 key-value heads")
    assert "leave it out" in decode.cannot(options_of("--device", "cpu", "--mps"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "--mps: " in decode.cannot(options_of("--mps"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "--device cpu runs without one" in decode.cannot(options_of())


def test_its_csv_file_is_drawn_as_a_panel_for_each_shape(tmp_path: Path) -> None:
    path = tmp_path / "decode.csv"
    eight = [replace(row, tokens=8) for row in ROWS]
    one = [replace(row, tokens=1, median=row.median / 2) for row in ROWS]
    other = [replace(row, shape="llama-3-8b") for row in ROWS]
    common.write_csv(path, [*eight, *one, *other], common.conditions(BENCH, "bench", []))
    picture = results.read(path)
    assert [panel.title.split(",")[0] for panel in picture.panels] == [
        "gpt-oss-20b",
        "llama-3-8b",
    ]
    first = picture.panels[0]
    assert [line.name for line in first.times] == ["fx_fusion", "Inductor's own one-shot"]
    assert list(first.times[0].x) == [1, 8]
    assert list(first.times[0].y) == [60, 120]
    assert [list(ratio.y) for ratio in first.ratios] == [[1.25, 1.25]]
    common.write_csv(path, [ROWS[0], ROWS[2]], common.conditions(BENCH, "bench", []))
    assert results.read(path).panels[0].ratios[0].y[0] == 2

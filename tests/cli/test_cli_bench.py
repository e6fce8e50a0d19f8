"""`fx-fusion bench`: one small run end to end, and what each benchmark makes of its rows."""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fx_fusion.bench import common, cpu, cpu_step, decode, kernels, pass_cost
from fx_fusion.cli.app import app
from fx_fusion.cli.bench import BENCHES, progress_file

RUNNER = CliRunner()
MODULES = (cpu, cpu_step, decode, kernels, pass_cost)
STEP = cpu_step.Row(2, "bfloat16", 4, 2048, 8, 9, 9, 30.0, 20.0, 10.0, 2.0)


def no_run(options: Namespace, progress: str = "") -> list[object]:
    raise AssertionError("measured although the command was wrong")


def test_a_run_on_real_ranks_prints_json_and_writes_a_csv_with_its_conditions(
    tmp_path: Path,
) -> None:
    path = tmp_path / "site.csv"
    sizes = ["--tokens", "1", "--hidden-size", "64", "--rounds", "2"]
    done = RUNNER.invoke(app, ["bench", "cpu", *sizes, "--csv", str(path), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["tokens"] for row in rows] == ["1"]
    assert [str(row["fused"]) for row in document["rows"]] == [row["fused"] for row in rows]
    assert min(float(rows[0][way]) for way in cpu.WAYS) > 0
    assert {name: rows[0][name] for name in common.CONDITIONS} == document["conditions"]
    assert rows[0]["torch"] == torch.__version__
    # the folder of the CSV file is nobody's business
    assert rows[0]["command"] == f"fx-fusion bench cpu {' '.join(sizes)} --csv site.csv"


def test_what_cannot_be_run_says_why_on_stderr_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "BENCH", cpu.BENCH.__class__(**vars(cpu.BENCH) | {"run": no_run}))
    wrong = [
        (["cpu", "--tokens", "1,many"], "'1,many' is not a list of whole numbers"),
        (["cpu", "--rounds", "1"], "'1' is not a whole number from 2 on"),
        (["cpu", "--csv", str(tmp_path / "missing" / "a.csv")], "a folder that exists"),
        (["cpu-step", "--hidden-size", "100"], "must be a multiple of"),
        (["cpu", "--colour"], "unrecognized arguments: --colour"),
    ]
    if torch.cuda.device_count() == 0:
        wrong.append((["kernels"], "needs a GPU"))
    for arguments, message in wrong:
        done = RUNNER.invoke(app, ["bench", *arguments])
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = RUNNER.invoke(app, ["bench", "cpu"])
    assert done.exit_code == 2
    assert "without torchrun" in done.stderr


def test_a_table_is_readable_when_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    step = cpu_step.BENCH.__class__(
        **vars(cpu_step.BENCH)
        | {"run": lambda options, progress: [STEP], "cannot": lambda _: ""}
    )
    monkeypatch.setattr(cpu_step, "BENCH", step)
    done = RUNNER.invoke(app, ["bench", "cpu-step", "--tokens", "8"])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    header, line = (text.split() for text in done.stdout.rstrip().splitlines()[-2:])
    assert header[-1] == "inductor/fx_fusion"
    assert line == ["8", "9", "of", "9", "30.00", "20.00", "10.00", "2.00x"]


def test_pass_cost_gives_each_number_of_layers_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        pass_cost, "measure", lambda layers: (0.01 * layers, 10.0 * layers, 2 * layers)
    )
    done = RUNNER.invoke(app, ["bench", "compile", "--layers", "1", "8", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"][1] == {
        "layers": 8,
        "sites": 16,
        "pass_seconds": 0.08,
        "compile_seconds": 80.0,
        "share": 0.001,
    }


@pytest.mark.parametrize("module", MODULES)
def test_each_benchmark_is_a_command_with_the_options_of_its_module(module: object) -> None:
    bench: common.Bench = vars(module)["BENCH"]
    assert BENCHES[bench.name][0] == bench.module
    assert vars(module)["__name__"] == f"fx_fusion.bench.{bench.module}"
    shown = RUNNER.invoke(app, ["bench", bench.name, "--help"])
    assert shown.exit_code == 0
    own = common.parser_of(bench, "").format_help().split("\n\n")[-1]
    assert own.split()[1] in shown.stdout
    assert "--json" in shown.stdout


def test_older_names_of_options_go_on_working() -> None:
    parser = common.parser_of(cpu.BENCH, "")
    given = parser.parse_args(["--hidden", "64,128", "--tokens", "1", "8,64"])
    assert cpu.cells_of(given)[:4] == [(1, 64), (8, 64), (64, 64), (1, 128)]
    assert parser.parse_args([]).hidden_size == cpu.HIDDEN_SIZES


def test_progress_is_counted_only_where_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_file("title", 2) as nobody:
        assert nobody == ""
        common.count_cell(nobody)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_file("title", 2) as looked_at:
        common.count_cell(looked_at)
        common.count_cell(looked_at)
        assert Path(looked_at).stat().st_size == 2
    assert not Path(looked_at).exists()
    assert capsys.readouterr().out == ""

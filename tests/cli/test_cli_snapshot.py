"""`fx-fusion snapshot`: a golden file is written, found the same, found different, missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from explained_models import written
from typer.testing import CliRunner

from fx_fusion.cli.app import app

RUNNER = CliRunner()


def snapshot(*arguments: str) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["snapshot", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_golden_file_is_asked_for_written_checked_and_told_apart(
    tmp_path: Path, when: str
) -> None:
    golden = tmp_path / "golden" / "graph.txt"
    given = (f"{written(tmp_path)}:build", "--file", str(golden), "--when", when)

    status, said = snapshot(*given)
    assert status == 2
    assert "there is no file" in said
    assert "--update writes it" in said

    assert snapshot(*given, "--update") == (0, f"{golden}: written\n")
    text = golden.read_text()
    assert ("fx_fusion.all_reduce_add_rms_norm" in text) == (when == "after")
    assert text.endswith(")\n")

    assert snapshot(*given) == (0, f"{golden}: the same\n")

    golden.write_text(text.replace("bf16[64, 4096]", "bf16[32, 4096]", 1))
    status, said = snapshot(*given)
    assert status == 1
    assert "\n-p0: bf16[32, 4096]" in said or "-p2: bf16[32, 4096]" in said
    assert said.endswith("differs; if that is meant, --update writes it anew\n")
    assert golden.read_text() != text

    status, said = snapshot(*given, "--update", "--json")
    assert status == 0
    assert json.loads(said)["written"]
    assert golden.read_text() == text


def test_a_call_s_keywords_are_looked_at_like_its_other_arguments(tmp_path: Path) -> None:
    golden = tmp_path / "graph.txt"
    given = (f"{written(tmp_path)}:layer_norm", "--file", str(golden), "--update")
    assert snapshot(*given) == (0, f"{golden}: written\n")
    assert "p1: bf16[64, 4096]" in golden.read_text()  # `residual`, on meta as x is


def test_arguments_that_name_no_snapshot_are_refused(tmp_path: Path) -> None:
    given = (f"{written(tmp_path)}:build", "--file", str(tmp_path / "golden.txt"), "--update")
    for more, words in (
        (["--when", "during"], "choose one of before, after"),
        (["--tokens", "1,2"], "a snapshot is of one number"),
    ):
        status, said = snapshot(*given, *more)
        assert status == 2
        assert words in said
    assert not (tmp_path / "golden.txt").exists()

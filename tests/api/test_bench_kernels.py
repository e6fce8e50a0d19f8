"""The kernels benchmark's table, its summary and its command line, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import signal
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fx_fusion.bench import kernel_runs
from fx_fusion.bench.common import plain
from fx_fusion.bench.kernel_candidates import FORCED, NAMES
from fx_fusion.bench.kernel_cells import Cell, cells_of, pooled, write_rows
from fx_fusion.bench.kernel_graphs import ALONE
from fx_fusion.bench.kernel_table import remarks, table
from fx_fusion.bench.kernel_times import Job, Measured, save, saved
from fx_fusion.bench.kernels import chosen, main
from fx_fusion.bench.results import read
from fx_fusion.errors import SpawnError

OPTIONS = Namespace(world_size=2, dtype="bfloat16", rounds=15, daemons=0)


def cell(name: str, median: float, cause: str = "", between: str = ALONE) -> Cell:
    low, high = median - 0.1, median + 0.1
    return Cell(name, 2, 8, 4096, "bfloat16", median, low, high, cause, between)


def test_the_table_shows_medians_spread_and_how_often_faster_ours_is() -> None:
    cells = [
        Cell("fx_fusion", 2, 8, 4096, "bfloat16", 4.0, 3.9, 4.2),
        Cell("unfused copy", 2, 8, 4096, "bfloat16", 10.0, 9.5, 11.0),
        Cell("fx_fusion", 2, 64, 4096, "bfloat16", 5.0, 5.0, 5.0),
        Cell("unfused copy", 2, 64, 4096, "bfloat16", 4.0, 4.0, 4.0),
    ]
    shown = table(cells, OPTIONS)
    first, second = shown.lines
    assert shown.header == ("tokens", "hidden", "fx_fusion", "unfused copy")
    assert first == ("8", "4096", "4.00 (3.9-4.2)", "10.00 (9.5-11.0) 2.50x")
    assert second[-1].endswith("0.80x")
    assert "4.00 (3.9-4.2)  10.00 (9.5-11.0) 2.50x" in plain(shown)
    assert "best unfused from any x / fx_fusion, up to 64 tokens: geometric mean 1.41 of 2" in (
        shown.note
    )
    assert "worst 0.80 (64x4096)" in shown.note


def test_flashinfer_is_shown_by_the_best_of_its_variants() -> None:
    cells = [
        cell("fx_fusion", 3.0),
        cell("flashinfer one-shot", 5.0),
        cell("flashinfer one-shot pdl", 4.0, cause="3 of 9 elements of its norm are wrong"),
        cell("flashinfer two-shot", math.nan, cause="too few tokens"),
    ]
    shown = table(cells, OPTIONS)
    assert shown.header[2:] == ("fx_fusion", "flashinfer")
    assert shown.lines[0][-1] == "4.00 (3.9-4.1) 1.33x"
    assert (
        "fx_fusion / best flashinfer, up to 64 tokens: geometric mean 0.75 of 1" in shown.note
    )
    assert remarks(cells) == [
        "Timed, but wrong: flashinfer one-shot pdl at 8x4096: 3 of 9 elements of its norm are"
        " wrong.",
        "Not measured: flashinfer two-shot at 8x4096: too few tokens.",
    ]


def test_a_candidate_that_was_not_measured_hides_no_other() -> None:
    cells = [cell("fx_fusion", math.nan, cause="it broke"), cell("unfused copy", 9.0)]
    shown = table(cells, OPTIONS)
    assert shown.header[2:] == ("unfused copy",)
    assert shown.lines[0][-1] == "9.00 (8.9-9.1)"


def test_what_stands_between_the_ops_has_lines_of_its_own() -> None:
    cells = [
        cell("fx_fusion", 3.0),
        cell("unfused copy", 9.0),
        cell("fx_fusion", 2.0, between="GEMMs, L2 cold"),
        cell("unfused copy", 7.0, between="GEMMs, L2 cold"),
    ]
    shown = table(cells, OPTIONS)
    assert shown.header[0] == "between ops"
    assert [line[0] for line in shown.lines] == ["nothing", "GEMMs, L2 cold"]
    assert "of 1 cells" in shown.note  # the summary is of the ops alone


def test_a_cell_is_the_median_over_the_rounds_of_all_runs() -> None:
    def run(ours: list[float], causes: dict[str, str]) -> list[Measured]:
        times = {"fx_fusion": ours} | ({} if causes else {"nccl": [9.0] * 3})
        return [Measured(8, 4096, ALONE, times, causes)]

    (measured,) = pooled([run([1.0, 2.0, 3.0], {}), run([4.0, 5.0, 6.0], {"nccl": "it broke"})])
    ours, other = cells_of(measured, "bfloat16", 4)
    assert (ours.candidate, ours.median, ours.low, ours.high) == ("fx_fusion", 3.5, 1.75, 5.25)
    assert math.isnan(other.median)
    assert (other.candidate, other.cause) == ("nccl", "it broke")
    assert (other.link_bytes, other.hops, ours.hops) == (2 * 3 * 8 * 8192 // 4, 6, -1)


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "partial")
    assert saved(path) == []
    found = [Measured(8, 4096, ALONE, {"nccl": [1.0, 2.0]}, {})]
    save(path, found)
    assert saved(path) == found
    assert [file.name for file in tmp_path.iterdir()] == ["partial"]
    save("", found)


def test_rows_are_written_as_sizes_are_done(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    given = {"bench": "kernels", "torch": "2.13.0"}
    found = [Measured(8, 4096, ALONE, {"fx_fusion": [1.0, 2.0, 3.0]}, {})]
    keep = pickle.loads(pickle.dumps(functools.partial(write_rows, path, given, "float16", 2)))
    keep([])
    assert not path.exists()
    keep(found)
    assert [panel.times[0].y for panel in read(path).panels] == [(2.0,)]
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.csv"]


def test_candidates_are_chosen_by_name_or_by_its_beginning() -> None:
    assert chosen("fx_fusion,flashinfer") == ["fx_fusion", *[n for n in NAMES if "flash" in n]]
    assert chosen("nccl, unfused") == ["unfused", "nccl"]
    assert chosen("fx_fusion o, fx_fusion t, T") == list(FORCED)
    assert chosen(",".join(NAMES)) == list(NAMES)


def test_an_unknown_candidate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--candidates", "magic"]) == 2
    assert "choose from fx_fusion" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


class TestRuns:
    """Runs that fail, on a stand-in for the ranks."""

    JOB = Job([(8, 4096), (64, 4096)], "bfloat16", 7, NAMES, {})

    def fail(self, monkeypatch: pytest.MonkeyPatch, *outcomes: int) -> None:
        """Let run after run fail after so many sizes."""
        left = list(outcomes)

        def spawned(*_: object, args: tuple[Job], **__: object) -> list[list[Measured]]:
            count = left.pop(0)
            found = [
                Measured(tokens, hidden, ALONE, {"nccl": [1.0]}, {})
                for tokens, hidden in args[0].sizes[:count]
            ]
            if count == len(args[0].sizes):
                return [found]
            save(args[0].partial, found if count else [])
            raise SpawnError("rank 1 did not finish")

        monkeypatch.setattr(kernel_runs, "spawn", spawned)
        monkeypatch.setattr(kernel_runs, "mps_daemon", contextlib.nullcontext)

    def test_the_sizes_before_a_failure_are_kept_and_the_failure_is_told(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.fail(monkeypatch, 1)
        (run,) = kernel_runs.measured_runs(self.JOB, 2, 10, 0)
        assert [one.tokens for one in run] == [8]
        assert "ended after 1 of 2 sizes" in capsys.readouterr().err

    def test_a_run_that_measured_nothing_costs_no_other_run(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.fail(monkeypatch, 0, 2)
        assert len(kernel_runs.measured_runs(self.JOB, 2, 10, 2)) == 1
        assert "Run 1 of 2 measured nothing" in capsys.readouterr().err

    def test_the_sizes_before_sigterm_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def spawned(*_: object, args: tuple[Job], **__: object) -> None:
            save(args[0].partial, [Measured(8, 4096, ALONE, {"nccl": [1.0]}, {})])
            signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(kernel_runs, "spawn", spawned)
        before = signal.getsignal(signal.SIGTERM)
        assert len(kernel_runs.measured_run(self.JOB, 2, 10)) == 1
        assert signal.getsignal(signal.SIGTERM) is before

    def test_if_no_run_measured_anything_it_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.fail(monkeypatch, 0)
        with pytest.raises(SpawnError, match="did not finish"):
            kernel_runs.measured_runs(self.JOB, 2, 10, 0)


def test_a_daemon_is_started_on_the_chosen_gpu_and_ended_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    control = tmp_path / kernel_runs.MPS_CONTROL
    control.write_text(
        f'#!/bin/sh\n[ "$1" = -d ] || read -r word\n'
        f'echo "$1 $word $CUDA_VISIBLE_DEVICES ${{CUDA_MPS_PIPE_DIRECTORY:+set}}" >> {log}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with kernel_runs.mps_daemon():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # as the daemon's clients count
    started, ended = log.read_text().splitlines()
    assert started.split() == ["-d", "3", "set"]
    assert ended.split() == ["quit", "0", "set"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert kernel_runs.daemon_cause(2, 2) == ""
    assert "a GPU of its own" in kernel_runs.daemon_cause(2, 1)
    monkeypatch.setenv("PATH", "")
    assert "is not installed" in kernel_runs.daemon_cause(2, 2)

"""The demo: it runs, and it believes nothing that it has not checked."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from fx_fusion import demo
from fx_fusion.demo_rank import EAGER, FUSED, INDUCTOR, RankResult
from fx_fusion.report import FusionReport, GraphReport, Reason, SiteReport

OPTIONS = Namespace(dtype="float32", steps=5, world_size=2, device="cpu")


def report_of(*kernels: str | None) -> FusionReport:
    """A report with one site for each kernel; None is a site left alone."""
    sites = tuple(
        SiteReport(fused=False, reason=Reason.NO_NORM)
        if kernel is None
        else SiteReport(fused=True, kernel=kernel)
        for kernel in kernels
    )
    return FusionReport((GraphReport(sites=sites),))


def result_of(report: FusionReport, difference: float = 1e-7, digest: str = "a") -> RankResult:
    """What a rank would hand back."""
    return RankResult(
        report=report,
        differences={INDUCTOR: 2e-7, FUSED: difference},
        largest_logit=1.0,
        digest=digest,
        seconds={EAGER: 0.003, FUSED: 0.001},
        decode_seconds={EAGER: 0.0003, INDUCTOR: 0.0002, FUSED: 0.0001},
        compile_seconds=1.0,
    )


GOOD = result_of(report_of("unfused", "unfused"))


def test_the_demo_runs_on_two_processes_and_every_site_is_rewritten(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fx_fusion.demo", "--device=cpu", "--layers=1", "--steps=1"],
        # Without a trial of vector code, C++ compiles sooner.
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "TORCHINDUCTOR_VEC_ISA_OK": "0",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    closing = done.stdout.splitlines()[-1]
    sites = re.match(r"(\d+) of (\d+) sites ", closing)
    assert sites is not None, closing
    # Attention's and the MLP's, and the embedding's in the releases of transformers that shard it.
    assert sites[1] == sites[2] in ("2", "3")
    assert closing.endswith("the 2 ranks agree bit for bit.")
    # Each all_reduce is shown with its module.
    for module in ("self_attn.o_proj", "mlp.down_proj"):
        assert f"model.layers.0.{module}" in done.stdout


def test_what_is_right_gives_no_problem() -> None:
    assert demo.find_problems([GOOD, GOOD], OPTIONS) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (dataclasses.replace(GOOD, digest="b"), "differ in some bit"),
        (dataclasses.replace(GOOD, report=report_of("unfused")), "reports differ"),
        (result_of(GOOD.report, difference=1e-3), "rank 1 is 1.00e-03 from eager"),
        (result_of(GOOD.report, difference=float("nan")), "rank 1 is nan from eager"),
    ],
)
def test_a_rank_that_is_wrong_is_a_problem(other: RankResult, words: str) -> None:
    (problem,) = demo.find_problems([GOOD, other], OPTIONS)
    assert words in problem


@pytest.mark.parametrize(
    ("report", "words"),
    [(FusionReport(), "no all_reduce was found"), (report_of(None), "no site was rewritten")],
)
def test_a_graph_where_nothing_was_done_is_a_problem(report: FusionReport, words: str) -> None:
    (problem,) = demo.find_problems([result_of(report)] * 2, OPTIONS)
    assert words in problem


@pytest.mark.parametrize(
    ("report", "start"),
    [
        (report_of("unfused", None), "1 of 2 sites rewritten, running the unfused path;"),
        (report_of("one_shot", "one_shot"), "2 of 2 sites fused;"),
        (
            report_of("one_shot", "unfused", None),
            "2 of 3 sites fused, 1 of them running the unfused path;",
        ),
    ],
)
def test_only_a_kernel_of_its_own_is_called_fused(report: FusionReport, start: str) -> None:
    results = [result_of(report)] * 2
    assert demo.closing_line(results, OPTIONS).startswith(start)
    assert ("(unfused path)" in demo.table(results, OPTIONS)) == ("of 2 sites re" in start)


def test_the_allowed_difference_grows_with_the_dtype_s_rounding() -> None:
    single = demo.bound([GOOD], OPTIONS)
    half = demo.bound([GOOD], Namespace(dtype="bfloat16"))
    assert half == single * 2**16


def test_ranks_that_do_not_finish_fail_the_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # the demo sets them; put back afterwards
    assert demo.main(["--device", "cpu", "--timeout", "1"]) == 1
    assert "did not finish within 1 s" in capsys.readouterr().err


def test_sizes_that_do_not_split_over_the_ranks_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        demo.parse(["--hidden-size", "96", "--world-size", "2", "--device", "cpu"])
    assert "must be a multiple of 32" in capsys.readouterr().err

"""What FusionReport.save writes, and that repro.py gives the recorded outcomes."""

from __future__ import annotations

import ast
import dataclasses
import json
import runpy
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_reports import HIDDEN, all_reduce, norm, saved_report
from torch.fx.experimental.proxy_tensor import make_fx

import fx_fusion
from fx_fusion import compiled
from fx_fusion.errors import SaveError
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.report import FusionReport, GraphReport, Reason
from fx_fusion.report_repro import repro_text
from fx_fusion.testing import fake_group

FILES = {"index.html", "report.json", "before.txt", "after.txt", "repro.py"}


@pytest.fixture(scope="module")
def report() -> FusionReport:
    return saved_report()


def test_the_folder_holds_the_report_and_the_graphs(
    report: FusionReport, tmp_path: Path
) -> None:
    page = report.save(tmp_path / "new" / "folder")
    assert page == tmp_path / "new" / "folder" / "index.html"
    assert {path.name for path in page.parent.iterdir()} == FILES
    stored = json.loads((page.parent / "report.json").read_text(encoding="utf-8"))
    assert FusionReport.from_dict(stored) == report
    before = (page.parent / "before.txt").read_text(encoding="utf-8")
    after = (page.parent / "after.txt").read_text(encoding="utf-8")
    assert before.count("_c10d_functional.all_reduce(") == len(report.sites)
    assert after.count("fx_fusion.all_reduce_add_rms_norm(") == report.fused_count > 0


def test_a_folder_with_files_is_left_alone_unless_told(
    report: FusionReport, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(SaveError, match=r"isn't empty.*overwrite=True"):
        report.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    report.save(str(tmp_path), overwrite=True)
    report.save(tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "notes.txt"}


def test_a_path_that_is_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SaveError, match="can't write there"):
        FusionReport().save(tmp_path / "file")
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)


def test_repro_gives_each_recorded_outcome(
    report: FusionReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {
        Reason.LAYER_NORM,
        Reason.UNSUPPORTED_STEP,
        Reason.REDUCE_OP,
        Reason.SUMMED_ALL_REDUCES,
        Reason.NO_NORM,
        Reason.LEAVES_GRAPH,
    }
    assert expected <= report.reasons().keys()
    assert report.fused_count == 3
    path = report.save(tmp_path / "report").parent / "repro.py"
    program = runpy.run_path(str(path))
    assert program["main"]() == 0
    printed = capsys.readouterr().out
    recorded = printed.count("recorded as")
    # The two unsupported steps are told apart, and so are the two kinds of fused sites.
    assert recorded == printed.count("the same here") == len(report.reasons()) + 3
    text = path.read_text(encoding="utf-8")
    assert f"tensor((16, {HIDDEN}), torch.float32, strides=(1, 16), dynamic=[0])" in text


def test_a_group_of_one_and_a_switched_off_pass_are_reproduced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return norm(all_reduce(x))

    x = torch.empty(4, HIDDEN)
    with fake_group(1):
        alone = fx_fusion.explain(block)(x)
    with fake_group(2), fx_fusion.disable():
        off = fx_fusion.explain(block)(x)
    both = FusionReport.merged([alone, off])
    assert list(both.reasons()) == [Reason.GROUP_OF_ONE, Reason.DISABLED]
    path = both.save(tmp_path / "report").parent / "repro.py"
    assert runpy.run_path(str(path))["main"]() == 0
    assert capsys.readouterr().out.count("the same here") == 2


def test_settings_and_target_are_those_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return norm(residual + all_reduce(x) + all_reduce(x * 2))

    x = torch.empty(4, HIDDEN, dtype=torch.bfloat16)
    target = fx_fusion.Target(arch="sm_90")
    with fake_group(8):
        report = fx_fusion.explain(block, merge_all_reduces=True, target=target)(x, x)
    assert report.fused_count > 0
    path = report.save(tmp_path / "report").parent / "repro.py"
    text = path.read_text(encoding="utf-8")
    assert "merge_all_reduces=True, target=fx_fusion.Target(arch='sm_90')" in text
    assert runpy.run_path(str(path))["main"]() == 0
    assert "the same here" in capsys.readouterr().out


def test_a_site_with_another_library_s_op_is_left_out_of_repro(report: FusionReport) -> None:
    (graph,) = report.graphs
    assert graph.record is not None
    record = graph.record.sites[0]
    assert record is not None
    line = dataclasses.replace(record.before.lines[-1], op="somelib.norm.default")
    before = dataclasses.replace(record.before, lines=(*record.before.lines[:-1], line))
    changed = dataclasses.replace(
        graph.record, sites=(dataclasses.replace(record, before=before),)
    )
    alone = GraphReport(graph.kind, graph.sites[:1], record=changed)
    text = repro_text(FusionReport((alone,)))
    assert "site 1: somelib.norm.default is another library's op" in text
    assert "def site_1" not in text


def test_a_report_without_graphs_says_what_is_missing(
    report: FusionReport, tmp_path: Path
) -> None:
    loaded = FusionReport.from_dict(json.loads(report.to_json()))
    page = loaded.save(tmp_path / "loaded")
    assert "not kept" in (page.parent / "before.txt").read_text(encoding="utf-8")
    assert "No picture" in page.read_text(encoding="utf-8")
    repro = page.parent / "repro.py"
    assert "explain the model anew" in repro.read_text(encoding="utf-8")
    assert runpy.run_path(str(repro))["main"]() == 0
    empty = FusionReport().save(tmp_path / "empty")
    assert "no all_reduce found" in empty.read_text(encoding="utf-8")


def test_text_of_the_user_s_code_can_break_neither_page_nor_program(
    report: FusionReport,
) -> None:
    hostile = "</script><script>alert(1)</script>\n\"'''\\ import os\u2028print(1)"
    (graph,) = report.graphs
    site = dataclasses.replace(
        graph.sites[0], source=hostile, module=hostile, group=hostile, norm=hostile
    )
    changed = FusionReport(
        (dataclasses.replace(graph, sites=(site, *graph.sites[1:]), notes=(hostile,)),), hostile
    )
    from fx_fusion.report_page import report_page

    assert "<script>alert" not in report_page(changed)
    before = ast.dump(ast.parse(repro_text(report)))
    after = ast.dump(ast.parse(repro_text(changed)))
    # The first of the two fused sites is another one now; comments are all that differs else.
    assert "alert" not in after
    assert len(after) >= len(before)


def test_the_texts_that_a_process_keeps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    fx_fusion.clear_reports()
    x = torch.empty(4, HIDDEN)

    def block(x: torch.Tensor) -> torch.Tensor:
        return norm(all_reduce(x))

    with fake_group(2):
        (graph,) = fx_fusion.explain(block)(x).graphs
    assert graph.record is not None
    monkeypatch.setattr(compiled, "TEXT_BYTES", 2 * graph.record.text_bytes)
    for _ in range(4):
        compiled.record(graph)
    kept: list[Any] = [report.graphs[0].record for report in fx_fusion.reports()]
    assert [bool(record.before) for record in kept] == [False, False, True, True]
    assert all(record.sites for record in kept)
    fx_fusion.clear_reports()


@pytest.mark.parametrize("wanted", [False, True])
def test_a_compilation_keeps_the_texts_only_if_the_environment_asks(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FX_FUSION_KEEP_GRAPHS", str(int(wanted)))
    fx_fusion.clear_reports()
    with fake_group(2), torch.no_grad():
        graph = make_fx(lambda x: norm(all_reduce(x)))(torch.empty(4, HIDDEN)).graph
        FusionPass()(graph)
    (report,) = fx_fusion.reports()
    record = report.graphs[0].record
    assert record is not None
    assert record.sites
    assert ("all_reduce" in record.before) is wanted
    assert ("all_reduce" in record.after) is wanted
    fx_fusion.clear_reports()


def test_a_record_has_no_part_in_equality_or_json(report: FusionReport) -> None:
    (graph,) = report.graphs
    bare = GraphReport(graph.kind, graph.sites, graph.notes)
    assert graph.record is not None
    assert bare == graph
    assert FusionReport((bare,)).to_json() == report.to_json()

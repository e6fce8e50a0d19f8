from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_support import counts, fused_graphs, inputs, layer, targets
from torch import fx

import fx_fusion
from fx_fusion import compat
from fx_fusion.passes import graph_pass, pipeline, registry
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.report import GraphReport, Reason
from fx_fusion.settings import FusionSettings
from fx_fusion.testing import fake_group

pytest_plugins = ["compile_fixtures"]
pytestmark = pytest.mark.usefixtures("compiling")


def test_equal_settings_make_equal_passes_with_one_uuid() -> None:
    first, second = FusionPass(), FusionPass(FusionSettings())
    other = FusionPass(FusionSettings(deterministic=True))
    assert first == second
    assert hash(first) == hash(second)
    assert first.uuid() == second.uuid()
    assert first != other
    assert first.uuid() != other.uuid()


def test_it_survives_copying_and_pickling() -> None:
    ours = FusionPass(FusionSettings(deterministic=True))
    assert copy.deepcopy(ours) == ours
    assert pickle.loads(pickle.dumps(ours)) == ours


def test_the_uuid_changes_with_the_switch() -> None:
    on = FusionPass().uuid()
    with fx_fusion.disable():
        assert FusionPass().uuid() != on
    assert FusionPass().uuid() == on


def test_the_uuid_changes_with_the_process_groups() -> None:
    seen = {FusionPass().uuid()}
    for world_size in (2, 4):
        with fake_group(world_size):
            seen.add(FusionPass().uuid())
            dist.new_group([0])
            seen.add(FusionPass().uuid())
    assert len(seen) == 5
    with fake_group(4):
        assert FusionPass().uuid() in seen


def test_the_uuid_does_not_depend_on_the_rank() -> None:
    uuids = set()
    for rank in range(2):
        with fake_group(2, rank=rank):
            uuids.add(FusionPass().uuid())
    assert len(uuids) == 1


def test_the_uuid_changes_with_the_registered_ops() -> None:
    before = FusionPass().uuid()
    fx_fusion.register_rms_norm("graph_pass_test::norm")
    try:
        assert FusionPass().uuid() != before
    finally:
        registry.unregister("graph_pass_test::norm")
    assert FusionPass().uuid() == before


@pytest.mark.parametrize(
    ("name", "value"), [("versions", ("2.99", "9.9")), ("device_archs", ("sm_90", "sm_100"))]
)
def test_the_uuid_changes_with_torch_and_the_devices(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    before = FusionPass().uuid()
    monkeypatch.setattr(compat, name, lambda: value)
    assert FusionPass().uuid() != before


@pytest.mark.parametrize("file", ["find_sites.py", "select.py", "ops.py", "report.py"])
def test_the_sources_that_steer_it_are_in_the_digest(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    edited = b""

    def read(path: Path) -> bytes:
        return path.name.encode() + (edited if path.name == file else b"")

    monkeypatch.setattr(Path, "read_bytes", read)
    take = graph_pass._sources_digest.__wrapped__  # the function behind its cache
    before = take()
    assert take() == before
    edited = b"#"
    assert take() != before


def raising(graph: fx.Graph, *args: Any, **kwargs: Any) -> GraphReport:
    """Fails after it has taken the graph half apart."""
    norm = next(node for node in graph.nodes if "rsqrt" in str(node.target))
    norm.replace_all_uses_with(norm.args[0])
    graph.erase_node(norm)
    raise RuntimeError("a fault of ours\nwith details")


def misordering(graph: fx.Graph, *args: Any, **kwargs: Any) -> GraphReport:
    """Reports a success, and leaves the graph invalid."""
    report = FUSE(graph, *args, **kwargs)
    nodes = list(graph.nodes)
    nodes[-2].append(nodes[0])
    return report


FUSE = pipeline.fuse_graph


@pytest.mark.parametrize("fault", [raising, misordering])
def test_a_fault_of_ours_leaves_the_graph_unfused_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Any
) -> None:
    monkeypatch.setattr(pipeline, "fuse_graph", fault)
    with fake_group(4), torch.no_grad():
        given = inputs()
        outputs = torch.compile(layer, backend="fx_fusion", fullgraph=True)(*given)
        for output, expected in zip(outputs, layer(*given), strict=True):
            torch.testing.assert_close(output, expected)
    (report,) = fx_fusion.reports()
    (site,) = report.sites
    assert site.reason is Reason.INTERNAL_ERROR
    assert (report.fused_count, report.site_count) == (0, 1)
    assert "left it unfused" in report.notes[0]
    if fault is raising:
        assert site.numbers == {"error": "RuntimeError: a fault of ours"}
    ours = [record for record in caplog.records if record.name.startswith("fx_fusion")]
    (warning,) = [record for record in ours if record.levelno == logging.WARNING]
    assert "Please report this" in warning.getMessage()
    assert warning.exc_info is not None


def test_a_fault_in_the_trace_does_not_break_the_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no disk")

    monkeypatch.setattr(compat, "is_tracing", lambda: True)
    monkeypatch.setattr("fx_fusion.trace.emit", broken)
    with fake_group(4), torch.no_grad():
        torch.compile(layer, backend="fx_fusion")(*inputs())
    assert fx_fusion.reports()[0].fused_count == 1
    assert "can't write its trace" in caplog.text


def test_each_graph_logs_one_summary_and_each_site_a_detail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="fx_fusion")
    with fake_group(4), torch.no_grad():
        torch.compile(layer, backend="fx_fusion")(*inputs())
    info = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    summary = "fx_fusion: 1 of 1 all_reduces fused (inference graph); all_reduce 1 -> 0"
    assert info == [summary]
    ours = [r for r in caplog.records if r.name == graph_pass.__name__]
    debug = [r.getMessage() for r in ours if r.levelno == logging.DEBUG]
    assert len(debug) == 1
    assert "compile_support.py:" in debug[0]
    assert "fused" in debug[0]


def test_it_can_stand_in_inductor_s_slot_by_itself() -> None:
    with fake_group(4), torch.no_grad(), fused_graphs() as graphs:
        torch.compile(layer, options={compat.POST_PASS: FusionPass()})(*inputs())
    assert [counts(ops) for ops in graphs] == [(1, 0)]


def test_it_can_be_called_on_a_graph_outside_of_a_compilation() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(x)
    fx.GraphModule({}, graph)
    FusionPass()(graph)
    assert targets(graph) == []
    (report,) = fx_fusion.reports()
    assert report.graphs[0].kind == "inference"
    assert report.sites == ()

"""The structured trace: artifacts of every graph where TORCH_TRACE is set, else nothing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fx_fusion import trace
from fx_fusion.report import GraphReport, Reason, SiteReport

PROGRAM = """
import torch, torch.distributed as dist, fx_fusion
from fx_fusion.testing import fake_group

def block_end(x, residual, weight):
    x = x + 1
    dist.all_reduce(x)
    h = residual + x
    return torch.nn.functional.rms_norm(h, (8,), weight, 1e-6), h

with fake_group(2):
    compiled = fx_fusion.compile(block_end, options={"cpp.vec_isa_ok": False})
    compiled(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8))
"""


def artifacts(folder: Path) -> dict[str, str]:
    """Name to payload of the artifacts in a trace: a JSON line, then lines behind a tab."""
    found: dict[str, str] = {}
    name = ""
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            if line.startswith("\t"):
                if name:
                    found[name] += line[1:] + "\n"
                continue
            start = line.find("{")
            name = ""
            if start >= 0 and '"artifact"' in line:
                name = json.loads(line[start:])["artifact"]["name"]
                found[name] = ""
    return found


def test_a_trace_holds_the_report_and_the_graph_before_and_after(tmp_path: Path) -> None:
    folder, cache = tmp_path / "trace", tmp_path / "cache"
    environment = {
        **os.environ,
        "TORCH_TRACE": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=300)
    found = artifacts(folder)
    report = GraphReport.from_dict(json.loads(found[trace.REPORT]))
    assert [site.fused for site in report.sites] == [True]
    assert "_c10d_functional.all_reduce(" in found[trace.BEFORE]
    assert "_c10d_functional.all_reduce(" not in found[trace.AFTER]
    assert "fx_fusion.all_reduce_add_rms_norm(" in found[trace.AFTER]


class Collected(logging.Handler):
    """Keeps the metadata of what is written to torch's trace."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", {})
        self.names.append(metadata.get("artifact", {}).get("name", ""))


@pytest.fixture
def log() -> logging.Logger:
    return logging.getLogger("torch.__trace")


REFUSED = GraphReport(sites=(SiteReport(fused=False, reason=Reason.NO_NORM),))


def test_a_graph_that_stays_as_it_was_is_written_once(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Collected()
    monkeypatch.setattr(log, "handlers", [handler])
    trace.emit(REFUSED, "graph", "graph")
    assert handler.names == [trace.REPORT, trace.BEFORE]


def test_nothing_is_written_without_a_trace(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "handlers", [])
    assert not trace.is_tracing()

    def unwanted(self: GraphReport) -> None:
        raise AssertionError("the report is written out though nobody reads it")

    monkeypatch.setattr(GraphReport, "to_dict", unwanted)
    trace.emit(REFUSED, "graph", "graph")

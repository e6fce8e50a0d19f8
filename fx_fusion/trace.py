"""Artifacts for torch's structured trace: with TORCH_TRACE set, tlparse shows what was fused.

Each graph gets three: `fx_fusion_report` (JSON, `GraphReport.to_dict`), and the graph's text
before and after the pass. Where no trace is written nothing is computed.
"""

from __future__ import annotations

import json
from typing import Final

from torch._logging._internal import trace_structured

from fx_fusion.compat import is_tracing
from fx_fusion.report import GraphReport

__all__ = ["AFTER", "BEFORE", "REPORT", "emit", "is_tracing"]

#: The artifacts' names.
REPORT: Final = "fx_fusion_report"
BEFORE: Final = "fx_fusion_graph_before"
AFTER: Final = "fx_fusion_graph_after"


def emit(report: GraphReport, before: str, after: str) -> None:
    """Write a graph's report and texts into the trace, if there is one.

    Args:
        report: What became of the graph's sites.
        before: `graph_text` of the graph as the pass found it.
        after: The same after the pass; written only if it differs.
    """
    if not is_tracing():
        return
    _artifact(REPORT, "json", json.dumps(report.to_dict(), sort_keys=True))
    _artifact(BEFORE, "string", before)
    if after != before:
        _artifact(AFTER, "string", after)


def _artifact(name: str, encoding: str, payload: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: payload,
        expect_trace_id=False,
    )

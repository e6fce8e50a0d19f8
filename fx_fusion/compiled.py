"""The reports of what this process has compiled, also where a cache made compiling unnecessary.

When torch finds a compiled graph in its cache, no pass runs. What does happen is that the counts
which compiling had added to Inductor's counters are added again (torch/_inductor/codecache.py,
`cache_hit_post_compile`). So a report is also written into the name of one such counter, and
comes back with every cache hit, in this process or another.

Counters are read (`collect`) before each look into the cache, since the pass' `uuid()` is called
then, and whenever reports are asked for. A report is lost only if someone clears torch's
counters between a cache hit and the next of these.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import weakref
from typing import Final
from uuid import uuid4

from fx_fusion.report import FusionReport, GraphReport

log = logging.getLogger(__name__)

#: A package's metadata has the report under this name.
PACKAGE_KEY: Final = "fx_fusion.report"
#: The counters' names: this, an id of the run of the pass, and the report as JSON.
PREFIX: Final = "fx_fusion.report:"

_lock = threading.RLock()
_reports: list[FusionReport] = []
#: What the texts of the reported graphs may take together, in bytes; the oldest go first.
TEXT_BYTES: Final = 8 << 20
#: How often each counter of ours had been counted when last looked at.
_seen: dict[str, int] = {}
#: The compilation whose package has been given a report, while it lasts.
_packaging: weakref.ref[object] | None = None


def reports() -> list[FusionReport]:
    """One report for each graph this process has compiled or loaded from a cache, in order.

    A model that is compiled twice gives two, a training step one for its forward and one for its
    backward graph.
    """
    with _lock:
        collect()
        return list(_reports)


def clear_reports() -> None:
    """Forget the reports so far, so that `reports()` holds what is compiled from now on."""
    with _lock:
        collect()
        _reports.clear()


def record(report: GraphReport) -> None:
    """Add the report of a graph that is being compiled; called by the pass."""
    from fx_fusion.compat import inductor_counters

    with _lock:
        collect()
        _reports.append(FusionReport((report,)))
        _bound_texts()
        # The id keeps the counters of two graphs with equal reports apart, so that each one's
        # cache entry brings back its own.
        key = f"{PREFIX}{uuid4().hex}:{json.dumps(report.to_dict(), sort_keys=True)}"
        inductor_counters()[key] = 1
        _seen[key] = 1


def package(report: GraphReport) -> None:
    """Put the report into the AOTInductor package that is being compiled, if one is.

    It comes back as `FusionReport.from_json(loaded.get_metadata()[PACKAGE_KEY])`.
    """
    from fx_fusion.compat import package_metadata

    global _packaging
    found = package_metadata()
    if found is None:
        return
    metadata, scope = found
    whole = FusionReport((report,))
    if (
        _packaging is not None and _packaging() is scope
    ):  # a second graph of this package, nested in the first, say
        whole = FusionReport.merged([FusionReport.from_json(metadata[PACKAGE_KEY]), whole])
    else:
        _packaging = weakref.ref(scope)
        # the next package may be compiled without us, and would carry the report of this one
        weakref.finalize(scope, metadata.pop, PACKAGE_KEY, None)
    metadata[PACKAGE_KEY] = whole.to_json()


def _bound_texts() -> None:
    """Let go of the oldest graphs' texts where all of them take more than `TEXT_BYTES`."""
    left = TEXT_BYTES
    for index in range(len(_reports) - 1, -1, -1):
        (graph,) = _reports[index].graphs
        if graph.record is None or not graph.record.text_bytes:
            continue
        left -= graph.record.text_bytes
        if left < 0:
            record = graph.record.with_texts("", "")
            _reports[index] = FusionReport((dataclasses.replace(graph, record=record),))


def collect() -> None:
    """Take in the reports that cache hits have brought back since the last call."""
    if "torch._dynamo.utils" not in sys.modules:
        return  # nothing can have been compiled
    from fx_fusion.compat import inductor_counters

    with _lock:
        counts = {k: n for k, n in inductor_counters().items() if k.startswith(PREFIX)}
        for key, count in counts.items():
            for report in _parsed(key) * (count - _seen.get(key, 0)):
                _reports.append(report)
                log.info("%s, from the compile cache", summary(report.graphs[0]))
        # Replaced, not updated: counters that someone has cleared start at nought again.
        _seen.clear()
        _seen.update(counts)


def summary(report: GraphReport) -> str:
    """One line on what became of a graph, for the log."""
    whole = FusionReport((report,))
    left = sum(not site.fused for site in report.sites)
    return (
        f"fx_fusion: {whole.fused_count} of {whole.site_count} all_reduces fused"
        f" ({report.kind} graph); all_reduce {len(report.sites)} -> {left}"
    )


def _parsed(key: str) -> list[FusionReport]:
    text = key.removeprefix(PREFIX).partition(":")[2]
    try:
        return [FusionReport((GraphReport.from_dict(json.loads(text)),))]
    except (ValueError, TypeError, KeyError):
        log.debug("a cached report of another fx_fusion can't be read: %.200s", text)
        return []

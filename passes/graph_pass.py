"""The custom pass that Inductor calls: `pipeline.fuse_graph` made safe, cacheable and visible.

Inductor runs it on each post-grad graph, last of its own passes over a functional graph (the
slot `post_grad_custom_post_pass`): once for an inference graph, twice for a training step, and
once for each graph nested in these.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from torch import fx

import fx_fusion
import fx_fusion.lowering.ops
from fx_fusion import compat, compiled, switch
from fx_fusion.graph_text import graph_text
from fx_fusion.passes import pipeline
from fx_fusion.passes.registry import registry_key
from fx_fusion.passes.undo import Snapshot
from fx_fusion.record import GraphRecord
from fx_fusion.report import GraphReport, Reason, SiteReport
from fx_fusion.settings import FusionSettings

log = logging.getLogger(__name__)

#: With this environment variable at 1 the reports of compilations hold the graphs' texts.
KEEP_GRAPHS: Final = "FX_FUSION_KEEP_GRAPHS"
#: Modules outside passes/ and lowering/ that steer what the pass does or what it reports.
_STEERING: Final = ("compat", "report", "settings", "switch")

_NO_TEXT: Final = "fx_fusion can't write a graph as text; please report this"
_NO_TRACE: Final = "fx_fusion can't write its trace; please report this"


class FusionPass(compat.InferenceAwarePass):
    """Fuses what can be fused in a graph; equal settings make equal passes.

    Attributes:
        settings: The options.
        keeps_texts: Put the graph's text, before and after, into the report. That takes as long
            as a third of the pass, so a compilation does it only if the environment asks for it.
    """

    keeps_texts = False

    def __init__(self, settings: FusionSettings | None = None) -> None:
        """Make a pass with these settings, or the defaults."""
        self.settings = FusionSettings() if settings is None else settings

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        """Fuse in place and record the report. Never raises for what a graph holds.

        Args:
            graph: A post-grad graph.
            is_inference: Whether no backward graph belongs to it; None if unknown (torch 2.11).
        """
        report = self._reported(graph, compat.graph_kind(is_inference))
        _offer_residuals(graph)
        compiled.record(report)
        compiled.package(report)
        _log(report)
        if compat.is_tracing():
            _trace(report)

    def uuid(self) -> str:
        """The pass' part of the compile-cache key: a digest of `key()`.

        torch calls it right before it looks into its cache, which is also the moment to take
        in what earlier cache hits brought back.
        """
        compiled.collect()
        return hashlib.sha256(repr(self.key()).encode()).hexdigest()

    def key(self) -> tuple[tuple[str, Any], ...]:
        """Everything that steers the pass, by name.

        A graph names the process groups it reduces over, and the world size that goes with a name
        is part of what gets compiled, so the groups of this process are in it.
        """
        return (
            ("version", fx_fusion.__version__),
            ("sources", _sources_digest()),
            ("settings", self.settings.key()),
            ("disabled", switch.is_disabled_for_compile()),
            ("torch, triton", compat.versions()),
            ("groups", tuple(sorted(compat.all_group_sizes().items()))),
            ("archs", compat.device_archs()),
            ("registered ops", registry_key()),
        )

    def __eq__(self, other: object) -> bool:
        """True for a pass with equal settings, so that torch needn't compile again for it."""
        return isinstance(other, FusionPass) and other.settings == self.settings

    def __hash__(self) -> int:
        """Equal for equal settings."""
        return hash((FusionPass, self.settings))

    def __repr__(self) -> str:
        """The pass with its settings."""
        return f"FusionPass({self.settings})"

    def _reported(self, graph: fx.Graph, kind: str | None) -> GraphReport:
        """Fuse in place; the report, if wanted with the graph's text as it was and as it is."""
        wanted = self.keeps_texts or compat.is_tracing() or _environment_keeps_texts()
        before = _text(graph) if wanted else ""
        report = self._fused_or_restored(graph, kind)
        record = report.record or GraphRecord()
        if wanted:
            record = record.with_texts(before, _text(graph))
        notes = (*report.notes, *_caching_notes())
        return dataclasses.replace(report, notes=notes, record=record)

    def _fused_or_restored(self, graph: fx.Graph, kind: str | None) -> GraphReport:
        """Fuse; if that fails, put the graph back and say so. A fault of ours must not become
        the user's compile error."""
        snapshot = Snapshot(graph)
        try:
            _register_lowering()  # nothing is fused where Inductor can't be told how to order it
            # Held as it was when the compilation began: a backward graph may be compiled later.
            with switch.disable(switch.is_disabled_for_compile()):
                report = pipeline.fuse_graph(graph, self.settings, kind=kind)
            if any(site.fused for site in report.sites):
                graph.lint()
        except Exception as error:
            snapshot.restore()
            log.warning(
                "fx_fusion failed on a graph and left it unfused. Results are not affected."
                " Please report this, with the traceback below.",
                exc_info=True,
            )
            return _failed(graph, kind, error)
        return report


def _failed(graph: fx.Graph, kind: str | None, error: Exception) -> GraphReport:
    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    site = SiteReport(fused=False, reason=Reason.INTERNAL_ERROR, numbers={"error": text})
    reduces = [node for node in graph.nodes if "all_reduce" in str(node.target)]
    return GraphReport(
        kind=kind or pipeline.graph_kind(graph),
        sites=(site,) * len(reduces),
        notes=(f"fx_fusion failed on this graph and left it unfused ({text}).",),
    )


def _caching_notes() -> Iterator[str]:
    """A sentence for each custom pass that keeps torch from caching what it compiles."""
    if not compat.caching_is_on():
        return
    for custom_pass in flattened(compat.custom_passes()):
        if not has_uuid(custom_pass):
            name = getattr(custom_pass, "__qualname__", type(custom_pass).__qualname__)
            yield (
                f"Nothing is cached: the custom pass {name} has no uuid; derive it from"
                " torch._inductor.custom_graph_pass.CustomGraphPass and return one."
            )


def flattened(passes: Iterable[object]) -> Iterator[object]:
    """The passes, with the members of composites in place of these."""
    for custom_pass in passes:
        members = getattr(custom_pass, "members", None)
        if isinstance(members, tuple):
            yield from flattened(members)
        else:
            yield custom_pass


def has_uuid(custom_pass: object) -> bool:
    """True if torch can put this pass into its cache key."""
    return isinstance(custom_pass, compat.CustomGraphPass) and bool(custom_pass.uuid())


def _log(report: GraphReport) -> None:
    for site in report.sites:
        outcome = "fused" if site.reason is None else f"not fused: {site.reason.value}"
        log.debug(
            "%s (%s): %s %s",
            site.source or "all_reduce",
            site.module,
            outcome,
            dict(site.numbers),
        )
    log.info("%s", compiled.summary(report))


def _environment_keeps_texts() -> bool:
    return os.environ.get(KEEP_GRAPHS, "") == "1"


def _text(graph: fx.Graph) -> str:
    """The graph as text, "" if it can't be written."""
    try:
        return graph_text(graph)
    except Exception:  # a text for people must not become the user's compile error
        log.warning(_NO_TEXT, exc_info=True)
        return ""


def _trace(report: GraphReport) -> None:
    """Add the report and both graphs to the structured trace."""
    from fx_fusion import trace

    assert report.record is not None
    try:
        trace.emit(report, report.record.before, report.record.after)
    except Exception:
        log.warning(_NO_TRACE, exc_info=True)


def _register_lowering() -> None:
    """Tell Inductor how to lower the op; on first use, as it loads all of Inductor."""
    from fx_fusion.lowering import inductor

    inductor.register()


def _offer_residuals(graph: fx.Graph) -> None:
    """Let Inductor write hidden states over residuals; last, as no later reader needs to know."""
    from fx_fusion.lowering import inductor

    inductor.offer_residuals(graph)


@functools.cache
def _sources_digest() -> str:
    """A hash of the code that decides what a graph becomes.

    Taken once, when this module is loaded: what counts is the code this process runs, not what
    the files say later. (torch's own helper for it remembers a single set of files.)
    """
    digest = hashlib.sha256()
    folders = [Path(__file__).parent, *map(Path, fx_fusion.lowering.__path__)]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    files += [
        Path(folder) / f"{name}.py" for folder in fx_fusion.__path__ for name in _STEERING
    ]
    for file in files:
        if file.exists():
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


_sources_digest()

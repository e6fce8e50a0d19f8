"""Find, judge and rewrite, strung together: a graph goes in, its report comes out.

This is the whole pass without Inductor around it; `graph_pass` puts it in Inductor's slot.
"""

from __future__ import annotations

import dataclasses
import logging

from torch import fx

from fx_fusion import compat
from fx_fusion.lowering.arch import device_arch
from fx_fusion.passes import nodes
from fx_fusion.passes.excerpt import excerpt_after, excerpt_before
from fx_fusion.passes.find_norms import find_norms
from fx_fusion.passes.find_sites import Site, find_sites
from fx_fusion.passes.judge import Decision, Facts, judge
from fx_fusion.passes.merge import Origin, merge_summed
from fx_fusion.passes.norm import Norm
from fx_fusion.passes.order import descendants, mutations_of
from fx_fusion.passes.outputs import chain_nodes, output_nodes, wanted_outputs
from fx_fusion.passes.rewrite import Rewriter
from fx_fusion.passes.source import module_of, source_of
from fx_fusion.passes.split_addmm import join_addmms, split_addmms
from fx_fusion.record import GraphRecord, SiteRecord
from fx_fusion.report import GraphReport, Reason, SiteReport
from fx_fusion.report_text import outcome_key
from fx_fusion.settings import FusionSettings
from fx_fusion.switch import is_disabled

log = logging.getLogger(__name__)


def fuse_graph(
    graph: fx.Graph, settings: FusionSettings, *, kind: str | None = None
) -> GraphReport:
    """Fuse what can be fused in a post-grad graph, in place, and say what became of the rest.

    Does no collective, bakes in no rank and leaves nothing behind in the process that a run
    would need. The cost is linear in the number of nodes.

    Args:
        graph: A functional aten graph whose nodes carry fake tensors in `meta["val"]`.
        settings: The options.
        kind: "inference", "forward" or "backward"; told from the placeholders if None.

    Returns:
        One SiteReport for every all_reduce the graph had, in program order.
    """
    kind = kind or graph_kind(graph)
    disabled = is_disabled()
    added = [] if disabled else split_addmms(graph)
    merged = merge_summed(graph) if settings.merge_all_reduces and not disabled else {}
    sites = find_sites(graph, find_norms(graph))
    facts = _facts(graph, kind, disabled) if sites else None
    rewriter = Rewriter(graph, settings)
    reports: dict[fx.Node, SiteReport] = {}
    records: dict[fx.Node, SiteRecord | None] = {}
    alike: dict[str, SiteRecord | None] = {}
    for found in sites:
        assert facts is not None
        described = _description(found)  # before the rewrite erases what it reads
        site = _refreshed(found, rewriter)
        if site.norm is not None and rewriter.is_stale(site):
            decision = Decision(reason=Reason.NORM_TAKEN, numbers={"norm": site.norm.formula()})
        else:
            decision = judge(site, facts, settings)
        key = _likeness(described, decision, site)
        if first := key not in alike:
            alike[key] = _record(found, settings)
        outputs: tuple[str, ...] = ()
        if decision.plan is not None:
            outputs = rewriter.rewrite(site, decision)
            if first:
                alike[key] = _with_result(alike[key], rewriter.fused[-1])
        reports[found.all_reduce] = _decided(described, decision, outputs)
        records[found.all_reduce] = alike[key]
    join_addmms(graph, added)
    ordered = _in_order(sites, reports, merged)
    kept = GraphRecord(_records_in_order(sites, records, merged), _chosen(settings))
    return GraphReport(kind=kind, sites=ordered, record=kept)


def graph_kind(graph: fx.Graph) -> str:
    """ "backward", "forward" (of a training step) or "inference", by the placeholders' names."""
    names = [str(node.target) for node in nodes.graph_nodes(graph, "placeholder")]
    if any(name.startswith("tangents") for name in names):
        return "backward"
    if any(name.startswith("primals") for name in names):
        return "forward"
    return "inference"


def _facts(graph: fx.Graph, kind: str, disabled: bool) -> Facts:
    tangents = [
        node
        for node in nodes.graph_nodes(graph, "placeholder")
        if str(node.target).startswith("tangents")
    ]
    return Facts(
        world_size=compat.group_world_size,
        arch=device_arch,
        mutations=mutations_of(graph),
        from_gradient=descendants(tangents, graph) if kind == "backward" else frozenset(),
        disabled=disabled,
    )


def _refreshed(site: Site, rewriter: Rewriter) -> Site:
    """The site with its inputs as earlier rewrites left them."""
    norm = site.norm
    if norm is not None:
        norm = dataclasses.replace(
            norm,
            weight=_current(rewriter, norm.weight),
            eps_node=_current(rewriter, norm.eps_node),
            residual=_current(rewriter, norm.residual),
        )
    x = _current(rewriter, site.x)
    return dataclasses.replace(site, norm=norm, x=x)


def _current(rewriter: Rewriter, node: fx.Node | None) -> fx.Node | None:
    return None if node is None else rewriter.current(node)


def _description(site: Site) -> SiteReport:
    """What is known of a site before it is judged."""
    value = nodes.tensor(site.reduced) if site.reduced is not None else nodes.tensor(site.x)
    shape = () if value is None else tuple(_size(size) for size in value.shape)
    steps = [step.kind for step in site.steps]
    if site.norm is not None and site.norm.residual is not None:
        steps.append("residual")
    return SiteReport(
        fused=False,
        source=source_of(site.all_reduce),
        module=module_of(site.all_reduce),
        shape=shape,
        dtype="" if value is None else str(value.dtype).removeprefix("torch."),
        group=site.group if isinstance(site.group, str) else "",
        norm=_formula(site.norm),
        steps=tuple(steps),
    )


def _likeness(report: SiteReport, decision: Decision, site: Site) -> str:
    """What must be equal for two sites to share a record: all that is reported but the module."""
    outputs: frozenset[str] = frozenset()
    if decision.plan is not None:
        outputs = wanted_outputs(chain_nodes(site), output_nodes(site))
    return outcome_key(_decided(report, decision, tuple(sorted(outputs))))


def _record(site: Site, settings: FusionSettings) -> SiteRecord | None:
    """What the graph looks like around a site, for pictures; these must not cost a fusion."""
    try:
        before = excerpt_before(site)
    except Exception:
        log.debug("no excerpt of the graph around %s", site.all_reduce, exc_info=True)
        return None
    value = nodes.tensor(site.reduced)
    if settings.target is not None:
        return SiteRecord(before, arch=settings.target.arch)
    return SiteRecord(before, arch="" if value is None else device_arch(value.device))


def _with_result(record: SiteRecord | None, fused: fx.Node) -> SiteRecord | None:
    if record is None:
        return None
    try:
        return dataclasses.replace(record, after=excerpt_after(fused))
    except Exception:
        log.debug("no excerpt of the graph around %s", fused, exc_info=True)
        return record


def _chosen(settings: FusionSettings) -> dict[str, str | bool]:
    """The settings that differ from their defaults; the target is kept with each site."""
    return {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.name != "target" and getattr(settings, field.name) != field.default
    }


def _records_in_order(
    sites: list[Site],
    records: dict[fx.Node, SiteRecord | None],
    merged: dict[fx.Node, tuple[Origin, ...]],
) -> tuple[SiteRecord | None, ...]:
    """One record for each report of `_in_order`."""
    ordered: list[SiteRecord | None] = []
    for site in sites:
        record = records[site.all_reduce]
        times = 1 + len(merged.get(site.all_reduce, ()))
        ordered += [record] * times
    return tuple(ordered)


def _formula(norm: Norm | None) -> str:
    return "" if norm is None else norm.formula()


def _size(size: object) -> int | str:
    known = nodes.static_size(size)
    return str(size) if known is None else known


def _decided(report: SiteReport, decision: Decision, outputs: tuple[str, ...]) -> SiteReport:
    plan = decision.plan
    return dataclasses.replace(
        report,
        fused=plan is not None,
        reason=decision.reason,
        numbers=dict(decision.numbers),
        world_size=decision.world_size,
        outputs=outputs,
        kernel="" if plan is None else plan.kernel,
    )


def _in_order(
    sites: list[Site],
    reports: dict[fx.Node, SiteReport],
    merged: dict[fx.Node, tuple[Origin, ...]],
) -> tuple[SiteReport, ...]:
    """The reports in program order; those merged away come right before what reduces them."""
    ordered: list[SiteReport] = []
    for site in sites:
        report = reports[site.all_reduce]
        for origin in merged.get(site.all_reduce, ()):
            steps = ("merged", *report.steps)
            ordered.append(
                dataclasses.replace(
                    report, source=origin.source, module=origin.module, steps=steps
                )
            )
        ordered.append(report)
    return tuple(ordered)

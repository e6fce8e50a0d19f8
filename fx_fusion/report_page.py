"""A saved report's page: one HTML file that opens from disk and loads nothing.

Standard library alone. All text that comes from the user's code is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

from fx_fusion.report import FusionReport, GraphReport, SiteReport
from fx_fusion.report_repro import DistinctSite, distinct_sites
from fx_fusion.report_style import CSS, SCRIPT
from fx_fusion.report_svg import (
    LEGEND,
    arrow_tip,
    count_ops,
    excerpt_boxes,
    panel_picture,
)
from fx_fusion.report_text import SiteGroup, decision, details, gradients, headline

#: With more sites than these the table scrolls by itself.
LONG_TABLE: Final = 30
#: This many distinct sites are shown opened.
OPEN: Final = 2

_COLUMNS: Final = ("#", "outcome", "source", "module", "tensor", "ranks", "why, or kernel", "")

#: What the page may load: nothing but what stands in it.
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)


def report_page(report: FusionReport) -> str:
    """The page as HTML."""
    sites, places = distinct_sites(report)
    title = headline(report)
    body = [f"<h1>{escape(title)}</h1>", *_remarks(report)]
    if places:
        body += _table_section(report, places)
    if sites:
        body += ["<h2>Distinct sites</h2>", _legend()]
        body += [_distinct(number, site) for number, site in enumerate(sites, start=1)]
    body.append(_FILES)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>fx_fusion: {escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<svg class="tip" aria-hidden="true">{arrow_tip("var(--arrow)")}</svg>
<main>
{chr(10).join(body)}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _remarks(report: FusionReport) -> Iterator[str]:
    """What holds for the report as a whole."""
    if report.incomplete:
        text = f"Incomplete: {report.incomplete}; nothing after it was seen."
        yield f'<p class="note">{escape(text)}</p>'
    for label, text in gradients(report):
        yield f'<p class="muted">{escape(label + text)}.</p>'
    for note in report.notes:
        yield f'<p class="note">{escape(note)}</p>'


def _table_section(report: FusionReport, places: Sequence[int | None]) -> Iterator[str]:
    yield "<h2>All sites</h2>"
    choices = sorted({_outcome(site) for site in report.sites})
    options = "".join(f'<option value="{name}">{name}</option>' for name in choices)
    yield (
        '<div class="filters" role="search">'
        '<label for="search">Search in all columns'
        '<input id="search" type="search" autocomplete="off" spellcheck="false"></label>'
        '<label for="outcome">Outcome<select id="outcome">'
        f'<option value="">all</option>{options}</select></label>'
        '<span id="shown" class="muted" role="status"></span></div>'
    )
    long = " long" if len(places) > LONG_TABLE else ""
    yield (
        f'<div class="scroll{long}" tabindex="0" role="region" aria-label="All sites">'
        '<table id="sites"><thead><tr>'
    )
    yield "".join(f'<th scope="col">{name or "details"}</th>' for name in _COLUMNS)
    yield "</tr></thead><tbody>"
    number = 0
    for index, graph in enumerate(report.graphs, start=1):
        where = f"{index} {graph.kind}" if len(report.graphs) > 1 else ""
        for site in graph.sites:
            yield _row(number + 1, where, site, places[number])
            number += 1
    yield "</tbody></table></div>"


def _outcome(site: SiteReport) -> str:
    return "gradient" if site.is_gradient else decision(site)


def _row(number: int, graph: str, site: SiteReport, place: int | None) -> str:
    outcome = _outcome(site)
    sizes = ", ".join(map(str, site.shape))
    link = ""
    if place is not None:
        link = f'<a href="#site-{place + 1}">site {place + 1}</a>'
    ranks = "?" if site.world_size is None else str(site.world_size)
    cause = site.kernel if site.reason is None else site.reason.value
    cells = (
        f"{number}" + (f' <span class="muted">graph {escape(graph)}</span>' if graph else ""),
        _coloured(site, outcome),
        f'<span class="path">{escape(site.source) or "unknown"}</span>',
        f'<span class="path">{escape(site.module) or "unknown"}</span>',
        f"<code>{escape(f'{site.dtype}[{sizes}]' if site.dtype else 'unknown')}</code>",
        escape(ranks),
        f"<span>{escape(cause)}</span>",
        link,
    )
    inner = "".join(
        f'<td data-label="{label or "details"}">{cell}</td>'
        for label, cell in zip(_COLUMNS, cells, strict=True)
    )
    return f'<tr data-outcome="{escape(outcome)}">{inner}</tr>'


def _coloured(site: SiteReport, text: str) -> str:
    kind = "muted" if site.is_gradient else "good" if site.fused else "bad"
    return f'<span class="{kind}">{escape(text)}</span>'


def _distinct(number: int, distinct: DistinctSite) -> str:
    """One distinct site: what is known of it, and its pictures."""
    site = distinct.site
    times = f", {distinct.count} times" if distinct.count > 1 else ""
    head = (
        f"{number}. {_coloured(site, decision(site))}{times}:"
        f' <span class="path">{escape(site.source) or "somewhere in the graph"}</span>'
    )
    group = SiteGroup(site, distinct.modules, distinct.count)
    facts = "".join(
        f"<dt>{escape(label)}</dt><dd>{_fact(label, text)}</dd>"
        for label, text in details(group)
    )
    opened = " open" if number <= OPEN else ""
    return (
        f'<details id="site-{number}"{opened}><summary>{head}</summary>'
        f'<div class="inside"><dl>{facts}</dl>{_pictures(distinct)}</div></details>'
    )


def _fact(label: str, text: str) -> str:
    if label in ("module", "reduces", "norm"):
        return f"<code>{escape(text)}</code>"
    return f"<strong>{escape(text)}</strong>" if label == "remedy" else escape(text)


def _pictures(distinct: DistinctSite) -> str:
    record = distinct.record
    if record is None:
        return (
            '<p class="muted">No picture: the report was read from JSON or from torch\'s'
            " compile cache, which hold no graphs. Use fx_fusion.explain.</p>"
        )
    before = excerpt_boxes(record.before)
    if record.after is None:
        picture = panel_picture(before, f"left as it is: {count_ops(before)}")
        return f'<div class="pictures">{picture}</div>'
    after = excerpt_boxes(record.after, distinct.site.outputs)
    pictures = (
        panel_picture(before, f"before: {count_ops(before)}"),
        panel_picture(after, f"after: {count_ops(after)}"),
    )
    return f'<div class="pictures">{"".join(pictures)}</div>'


def _legend() -> str:
    entries = "".join(
        '<li><svg width="22" height="14" aria-hidden="true">'
        f'<rect class="{kind}" x=".5" y=".5" width="21" height="13" rx="3"/></svg>'
        f"{escape(text)}</li>"
        for kind, text in LEGEND
    )
    return f'<ul class="legend">{entries}</ul>'


_FILES: Final = (
    "<h2>Files beside this page</h2><ul>"
    '<li><a href="before.txt">before.txt</a>, <a href="after.txt">after.txt</a>: the graphs as'
    " text, as the pass found and left them</li>"
    '<li><a href="repro.py">repro.py</a>: each distinct site as a program of its own, with the'
    " recorded shapes</li>"
    '<li><a href="report.json">report.json</a>: this report, for programs'
    " (<code>FusionReport.from_dict</code>)</li></ul>"
)


def graphs_text(graphs: Iterable[GraphReport], *, after: bool) -> str:
    """What before.txt or after.txt holds: each graph's text under a heading."""
    parts = []
    for index, graph in enumerate(graphs, start=1):
        text = ""
        if graph.record is not None:
            text = graph.record.after if after else graph.record.before
        missing = (
            "(not kept: read from JSON or torch's cache, older than what is kept, or compiled"
            " without FX_FUSION_KEEP_GRAPHS=1; fx_fusion.explain always keeps it)"
        )
        parts.append(f"graph {index} ({graph.kind})\n{text or missing}\n")
    return "\n".join(parts) or "(no graph was compiled)\n"

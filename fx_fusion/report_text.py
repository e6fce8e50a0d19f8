"""A report as text, and as HTML for notebooks: the answer first, then what it rests on.

Like `report` it needs only the standard library. All sites of a graph that came out the same (one
line of source in many layers) are shown once, with their number.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final

from fx_fusion.report import FusionReport, GraphReport, SiteReport

#: Columns of the text.
WIDTH: Final = 96
#: Columns in front of a site's details, the label included.
_INDENT: Final = 13

_UNFUSED: Final = " (the group's own all_reduce, then add and norm)"


@dataclass(frozen=True)
class SiteGroup:
    """Sites of one graph that came out the same.

    Attributes:
        site: The first of them.
        modules: The modules they're in, each once, in program order; empty if unknown.
        count: How many they are.
    """

    site: SiteReport
    modules: tuple[str, ...]
    count: int


def report_as_text(report: FusionReport) -> str:
    """The report as text of at most `WIDTH` columns where words allow; no newline at the end."""
    lines = [headline(report)]
    if report.incomplete:
        lines += _wrapped("incomplete: ", f"{report.incomplete}; nothing after it was seen")
    number = 0
    for index, graph in enumerate(report.graphs, start=1):
        groups = site_groups(graph)
        if groups and len(report.graphs) > 1:
            lines += ["", f"graph {index} ({graph.kind})"]
        elif groups:
            lines.append("")
        for group in groups:
            number += 1
            lines += _site_lines(number, group)
    closing = [*gradients(report), *(("note: ", note) for note in report.notes)]
    if closing:
        lines.append("")
    for label, text in closing:
        lines += _wrapped(label, text)
    return "\n".join(lines)


def headline(report: FusionReport) -> str:
    """The answer in one line: how many sites are fused, and whether a kernel runs them."""
    total, fused = report.site_count, report.fused_count
    if total == 0:
        return "no all_reduce found"
    sites = f"{total} site" if total == 1 else f"{total} sites"
    slow = sum(site.kernel == "unfused" for site in report.sites if site.fused)
    if fused == 0 or slow == 0:
        return f"{fused} of {sites} fused"
    if slow == fused:
        return f"{fused} of {sites} rewritten, running the unfused path"
    return f"{fused} of {sites} fused, {slow} of them running the unfused path"


def site_groups(graph: GraphReport) -> list[SiteGroup]:
    """The sites of a graph, gradients' left out, in order of the first of each group."""
    members: dict[str, list[SiteReport]] = {}
    for site in graph.sites:
        if not site.is_gradient:
            members.setdefault(outcome_key(site), []).append(site)
    return [
        SiteGroup(
            sites[0],
            tuple(dict.fromkeys(site.module for site in sites if site.module)),
            len(sites),
        )
        for sites in members.values()
    ]


def outcome_key(site: SiteReport) -> str:
    """What must be equal for sites to be shown as one: all but the module.

    Among the numbers are names of nodes ("add_7"), which differ though nothing else does.
    """
    numbers = {
        name: re.sub(r"_\d+$", "", value) if isinstance(value, str) else value
        for name, value in site.numbers.items()
    }
    return repr(replace(site, module="", numbers=numbers))


def _site_lines(number: int, group: SiteGroup) -> Iterator[str]:
    times = f" {group.count} times" if group.count > 1 else ""
    where = group.site.source or "somewhere in the graph"
    yield f"{number}. {decision(group.site)}{times}: {where}"
    for label, text in details(group):
        yield from _wrapped(f"   {label}".ljust(_INDENT), text)


def decision(site: SiteReport) -> str:
    """ "fused", "rewritten" (fused, but run by the unfused path) or "not fused"."""
    if not site.fused:
        return "not fused"
    return "rewritten" if site.kernel == "unfused" else "fused"


def details(group: SiteGroup) -> Iterator[tuple[str, str]]:
    """What there is to say about a site, label by label."""
    site = group.site
    if group.modules:
        yield "module", _range(group.modules)
    yield "reduces", _reduced(site)
    if site.steps:
        yield "then", ", ".join(site.steps)
    if site.norm:
        yield "norm", site.norm
    if site.outputs:
        yield "returns", ", ".join(site.outputs)
    if site.kernel:
        yield "kernel", site.kernel + (_UNFUSED if site.kernel == "unfused" else "")
    if site.reason is not None:
        yield "reason", _reason(site)
        yield "remedy", site.remedy


def _range(modules: Sequence[str]) -> str:
    if len(modules) <= 2:
        return ", ".join(modules)
    return f"{modules[0]} ... {modules[-1]}"


def _reduced(site: SiteReport) -> str:
    """ "bfloat16[4, 4096] over the 8 ranks of group '0'"."""
    known = f"{site.dtype}[{', '.join(map(str, site.shape))}]"
    text = known if site.dtype else "a tensor of unknown shape"
    if site.world_size is None:
        ranks = "over an unknown number of ranks"
    else:
        ranks = f"over {site.world_size} rank{'' if site.world_size == 1 else 's'}"
    return f"{text} {ranks}" + (f", group {site.group!r}" if site.group else "")


def _reason(site: SiteReport) -> str:
    assert site.reason is not None
    numbers = ", ".join(f"{name}={value}" for name, value in site.numbers.items())
    return f"{site.reason.value} ({numbers})" if numbers else site.reason.value


def gradients(report: FusionReport) -> Iterator[tuple[str, str]]:
    """What there is to say about the all_reduces of gradients, label and text."""
    count = sum(site.is_gradient for site in report.sites)
    if count:
        few = (
            "1 all_reduce of a gradient" if count == 1 else f"{count} all_reduces of gradients"
        )
        verb = "is" if count == 1 else "are"
        yield "backward: ", f"{few} {verb} left alone, as no norm follows"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


#: Notebooks align cells to the right.
_CELL: Final = "text-align: left"


def report_as_html(report: FusionReport) -> str:
    """The report as an HTML fragment with a table of its sites; all text is escaped."""
    parts = [f"<p><strong>{escape(headline(report))}</strong></p>"]
    if report.incomplete:
        text = escape(f"{report.incomplete}; nothing after it was seen")
        parts.append(f"<p>incomplete: {text}</p>")
    rows = [
        (str(index), graph.kind, group)
        for index, graph in enumerate(report.graphs, start=1)
        for group in site_groups(graph)
    ]
    if rows:
        titles = ("graph", "outcome", "sites", "source", "details")
        head = _row(map(escape, titles), "th")
        body = "".join(_row(_cells(*row), "td") for row in rows)
        parts.append(f"<table><thead>{head}</thead><tbody>{body}</tbody></table>")
    closing = [*gradients(report), *(("note: ", note) for note in report.notes)]
    parts += [f"<p>{escape(label + text)}</p>" for label, text in closing]
    return f'<div class="fx-fusion-report">{"".join(parts)}</div>'


def _cells(index: str, kind: str, group: SiteGroup) -> Iterator[str]:
    yield escape(f"{index} ({kind})")
    yield escape(decision(group.site))
    yield str(group.count)
    yield escape(group.site.source)
    yield "<br>".join(f"{escape(label)}: {escape(text)}" for label, text in details(group))


def _row(cells: Iterable[str], tag: str) -> str:
    inner = "".join(f'<{tag} style="{_CELL}">{cell}</{tag}>' for cell in cells)
    return f"<tr>{inner}</tr>"

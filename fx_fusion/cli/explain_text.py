"""The text of `fx-fusion explain`: each site once, then kernels and savings by tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from fx_fusion.cli.sites import (
    DYNAMIC,
    NOT_FUSED,
    UNFUSED,
    KernelRange,
    Row,
    Saving,
    Seen,
    Tokens,
)
from fx_fusion.report import FusionReport
from fx_fusion.report_text import WIDTH, details, gradients, headline

_INDENT = 13


def site_lines(rows: Sequence[Row], seen: Sequence[Seen]) -> Iterator[str]:
    """A block for each row, at the largest number of tokens; kernels are left to the table."""
    graphs = {row.graph for row in rows}
    last = 0
    for number, row in enumerate(rows, start=1):
        if len(graphs) > 1 and row.graph != last:
            yield ""
            yield f"graph {row.graph} ({row.kind})"
        elif number == 1:
            yield ""
        last = row.graph
        times = f" {row.group.count} times" if row.group.count > 1 else ""
        where = row.group.site.source or "somewhere in the graph"
        yield f"{number}. {_decision(row)}{times}: {where}"
        for label, text in details(row.group):
            if label == "kernel":
                continue
            if label == "reduces" and len(seen) > 1:
                text += f", with {seen[-1].tokens} tokens"
            yield from wrapped(f"   {label}".ljust(_INDENT), text)


def _decision(row: Row) -> str:
    if not row.group.site.fused:
        return "not fused"
    return "rewritten" if set(row.kernels.values()) == {UNFUSED} else "fused"


def print_kernels(
    console: Console, rows: Sequence[Row], savings: dict[Tokens, Saving], title: str
) -> None:
    """The table of kernels by tokens, the ranges behind it, and what the estimate rests on."""
    fused = [(number, row) for number, row in enumerate(rows, start=1) if row.ranges]
    if not fused:
        return
    console.print()
    console.print(title, markup=False)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("sites")
    table.add_column("kernel")
    table.add_column("saved a step", justify="right")
    for tokens, saving in savings.items():
        shown = [str(tokens), "", "", _saved(saving)]
        kernels: dict[tuple[str, str], list[int]] = {}
        for number, row in fused:
            kernels.setdefault((row.kernels[tokens], row.causes[tokens]), []).append(number)
        for (kernel, cause), numbers in kernels.items():
            shown[1] = _numbers(numbers, len(fused))
            shown[2] = f"{kernel}: {cause}" if cause else kernel
            table.add_row(*shown)
            shown = ["", "", "", ""]
    console.print(table, markup=False)
    for line in (*_range_lines(fused), *_basis_lines(savings)):
        console.print(line, markup=False)


def _saved(saving: Saving) -> str:
    if saving.microseconds is None:
        return "unknown"
    if saving.microseconds == 0:
        return "nothing"
    return f"about {duration(saving.microseconds)}"


def duration(microseconds: float) -> str:
    """Two or three digits with a unit: an estimate isn't known better."""
    sign = "-" if microseconds < 0 else ""
    value = abs(microseconds)
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e3)):
        if value < limit:
            return f"{sign}{value / scale:.3g} {unit}"
    return f"{sign}{value / 1e6:.3g} s"


def _numbers(numbers: Sequence[int], every: int) -> str:
    return "all" if len(numbers) == every > 1 else ", ".join(map(str, numbers))


def _range_lines(fused: Sequence[tuple[int, Row]]) -> Iterator[str]:
    groups: dict[tuple[KernelRange, ...], list[int]] = {}
    for number, row in fused:
        if len(row.ranges) > 1:
            groups.setdefault(row.ranges, []).append(number)
    for ranges, numbers in groups.items():
        parts = [f"{part.kernel} {_span(part)}" for part in ranges]
        label = f"ranges of rows (batch x tokens), sites {_numbers(numbers, len(fused))}: "
        yield from wrapped(label, "; ".join(parts), hanging=2)


def _span(part: KernelRange) -> str:
    if part.last is None:
        return f"from {part.first} on"
    return f"up to {part.last}" if part.first == 1 else f"from {part.first} to {part.last}"


def _basis_lines(savings: dict[Tokens, Saving]) -> Iterator[str]:
    estimated = {t: s for t, s in savings.items() if s.microseconds}
    if estimated:
        yield from wrapped(
            "",
            "saved a step: an estimate. It adds up, over the fused sites, what one site was measured to"
            " save over torch.compile alone; this model was not measured, and overlap with other"
            " work isn't known.",
            hanging=2,
        )
    reasons: dict[str, list[Tokens]] = {}
    for tokens, saving in savings.items():
        for part in saving.basis:
            reasons.setdefault(part, []).append(tokens)
    for part, which in reasons.items():
        known = len(which) == len(savings)
        label = "" if known else f"with {', '.join(map(str, which))}: "
        yield from wrapped(f"  {label}", part, hanging=4)


def closing_lines(report: FusionReport) -> Iterator[str]:
    """What is said once: gradients' all_reduces, where the view ends, notes."""
    if report.incomplete:
        yield from wrapped("incomplete: ", f"{report.incomplete}; nothing after it was seen")
    for label, text in (*gradients(report), *(("note: ", note) for note in report.notes)):
        yield from wrapped(label, text)


def heading(seen: Sequence[Seen], rows: Sequence[Row]) -> str:
    """The answer in one line, over all numbers of tokens."""
    every = {headline(one.report) for one in seen}
    if len(every) == 1:
        return every.pop()
    total = sum(row.group.count for row in rows)
    fused = sum(row.group.count for row in rows if row.ranges)
    here = {kernel for row in rows for kernel in row.kernels.values()}
    rest = "left as they are" if NOT_FUSED in here else "running the unfused path"
    return f"{fused} of {total} sites fused, some numbers of tokens {rest}"


def token_label(tokens: Tokens) -> str:
    """ "64 tokens", "a dynamic number of tokens"."""
    if tokens == DYNAMIC:
        return "a dynamic number of tokens"
    return f"{tokens} token{'' if tokens == 1 else 's'}"


def wrapped(label: str, text: str, hanging: int | None = None) -> list[str]:
    """Lines of at most WIDTH columns, indented below the label."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * (len(label) if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )

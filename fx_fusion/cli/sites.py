"""What `fx-fusion explain` found: the same sites at several numbers of tokens, with their kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from fx_fusion import measured
from fx_fusion.lowering.select import Plan, Problem, select
from fx_fusion.report import FusionReport, Reason, SiteReport
from fx_fusion.report_text import SiteGroup, outcome_key
from fx_fusion.settings import FusionSettings

#: Up to how many tokens ranges of kernels are looked for.
MOST_TOKENS: Final = 2**20
DYNAMIC: Final = "dynamic"
UNFUSED: Final = "unfused"
#: In place of a kernel, where the site stays in the graph as it was.
NOT_FUSED: Final = "not fused"
Tokens = int | str


@dataclass(frozen=True)
class Seen:
    """What came of one number of tokens, or of "dynamic"."""

    tokens: Tokens
    report: FusionReport


@dataclass(frozen=True)
class KernelRange:
    """The kernel from one number of rows to another, both inclusive; `last` None for no end."""

    first: int
    last: int | None
    kernel: str
    cause: str


@dataclass(frozen=True)
class Row:
    """Sites of one graph that came out the same, at every number of tokens.

    Attributes:
        graph: The graph's number, from 1; `kind` its kind.
        kind: See `graph`.
        group: The sites, as they are at the largest number of tokens.
        kernels: For each number of tokens the kernel, NOT_FUSED where none is faster.
        causes: For each number of tokens why no kernel of ours runs, "" where one does.
        shapes: For each number of tokens the reduced tensor's shape.
        ranges: The kernels by rows of the reduced tensor; empty where it can't be fused.
    """

    graph: int
    kind: str
    group: SiteGroup
    kernels: dict[Tokens, str] = field(default_factory=dict)
    causes: dict[Tokens, str] = field(default_factory=dict)
    shapes: dict[Tokens, tuple[int | str, ...]] = field(default_factory=dict)
    ranges: tuple[KernelRange, ...] = ()


@dataclass(frozen=True)
class Saving:
    """An estimate of the time saved a step.

    Attributes:
        microseconds: The estimate, or None where there is nothing to base one on.
        basis: What it rests on, or why there is none; a sentence part each.
    """

    microseconds: float | None
    basis: tuple[str, ...]


def rows_of(seen: Sequence[Seen], settings: FusionSettings) -> list[Row] | None:
    """The sites once for all numbers of tokens; None where the sites differ between them."""
    reference = seen[-1]
    keys = [[_key(site) for graph in s.report.graphs for site in graph.sites] for s in seen]
    if any(one != keys[-1] for one in keys):
        return None
    rows: list[Row] = []
    position = 0
    for number, graph in enumerate(reference.report.graphs, start=1):
        members: dict[str, list[int]] = {}
        for index, site in enumerate(graph.sites, start=position):
            if not site.is_gradient:
                members.setdefault(outcome_key(site), []).append(index)
        position += len(graph.sites)
        every = reference.report.sites
        for indices in members.values():
            modules = tuple(dict.fromkeys(every[i].module for i in indices if every[i].module))
            row = Row(number, graph.kind, SiteGroup(every[indices[0]], modules, len(indices)))
            rows.append(_planned(row, indices[0], seen, settings))
    return rows


def chooses(site: SiteReport) -> bool:
    """True for a site that can be fused; whether it is may depend on its rows."""
    return site.fused or site.reason is Reason.NOT_FASTER


def _key(site: SiteReport) -> str:
    """What must not depend on the number of tokens."""
    if chooses(site):
        site = dataclasses.replace(site, fused=True, reason=None, outputs=())
    return site.module + outcome_key(
        dataclasses.replace(site, shape=site.shape[-1:], kernel="", numbers={})
    )


def _planned(row: Row, index: int, seen: Sequence[Seen], settings: FusionSettings) -> Row:
    for one in seen:
        site = one.report.sites[index]
        row.shapes[one.tokens] = site.shape
        kernel, cause = _plan(site, _rows(site), settings) if chooses(site) else ("", "")
        row.kernels[one.tokens] = site.kernel if site.fused else kernel
        row.causes[one.tokens] = cause if kernel in (UNFUSED, NOT_FUSED) else ""
    return dataclasses.replace(row, ranges=_ranges(row.group.site, settings))


def _rows(site: SiteReport) -> int | None:
    """Rows of the reduced tensor, None where they're dynamic."""
    rows = 1
    for size in site.shape[:-1]:
        if not isinstance(size, int):
            return None
        rows *= size
    return rows


def _plan(site: SiteReport, rows: int | None, settings: FusionSettings) -> tuple[str, str]:
    """The kernel that `select` gives a site of so many rows, and why none; nothing is captured."""
    if not isinstance(site.shape[-1], int) or site.world_size is None:
        return "", ""
    target = settings.target
    problem = Problem(
        hidden_size=site.shape[-1],
        dtype=getattr(torch, site.dtype),
        world_size=site.world_size,
        arch="cpu" if target is None else target.arch,
        tokens=rows,
        deterministic=settings.deterministic,
    )
    answer = select(problem, settings)
    if isinstance(answer, Plan):
        return answer.kernel, answer.cause
    return NOT_FUSED, str(answer.numbers.get("cause", ""))


def _ranges(site: SiteReport, settings: FusionSettings) -> tuple[KernelRange, ...]:
    """The kernels of a site by its rows, from 1 to MOST_TOKENS and on."""
    if not chooses(site):
        return ()

    def at(rows: int) -> tuple[str, str]:
        return _plan(site, rows, settings)

    found: list[KernelRange] = []
    first = low = 1
    while low < MOST_TOKENS:
        high = low * 2
        if at(high) != at(low):
            good, bad = low, high
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if at(middle) == at(low) else (good, middle)
            found.append(KernelRange(first, good, *at(first)))
            first = bad
        low = high
    return (*found, KernelRange(first, None, *at(first)))


def saving(rows: Sequence[Row], tokens: Tokens, arch: str) -> Saving:
    """Estimate what a step with so many tokens saves: the sites times what one was measured to save."""
    fused = [row for row in rows if row.kernels[tokens] not in ("", NOT_FUSED)]
    fast = [row for row in fused if row.kernels[tokens] != UNFUSED]
    if not fast:
        why = "the unfused path runs, which saves nothing" if fused else "no site is fused"
        if all(cell.arch != arch for cell in measured.cells()):
            why += f"; nothing was measured for this target ({arch})"
        return Saving(0.0, (why,))
    if tokens == DYNAMIC:
        return Saving(None, ("give numbers of tokens for an estimate",))
    total = 0.0
    basis: dict[str, None] = {}
    for row in fast:
        site = row.group.site
        shape = row.shapes[tokens]
        count = _rows(dataclasses.replace(site, shape=shape))
        hidden = shape[-1]
        assert isinstance(hidden, int)
        assert site.world_size is not None
        found = (
            measured.Found(None, "the rows aren't known")
            if count is None
            else measured.lookup(arch, site.world_size, site.dtype, hidden, count)
        )
        if found.cell is None:
            return Saving(None, (found.note,))
        total += row.group.count * found.cell.saved
        basis[f"measured on {found.cell.conditions}"] = None
        if found.note:
            basis[f"nearest measured: {found.note}"] = None
    return Saving(total, tuple(basis))


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as JSON-able values."""
    return [
        {
            "graph": row.graph,
            "kind": row.kind,
            "count": row.group.count,
            "modules": list(row.group.modules),
            "site": row.group.site.to_dict(),
            "remedy": row.group.site.remedy,
            "kernels": [
                {
                    "tokens": tokens,
                    "shape": list(row.shapes[tokens]),
                    "kernel": kernel,
                    "cause": row.causes[tokens],
                }
                for tokens, kernel in row.kernels.items()
            ],
            "ranges": [dataclasses.asdict(part) for part in row.ranges],
        }
        for row in rows
    ]

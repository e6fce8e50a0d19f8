"""The text of `repro.py`: each distinct site of a report as a program of its own.

Standard library alone. The program needs no GPU, no weights and no other process: it writes the
recorded ops around a site as a function, hands fx_fusion.explain tensors of the recorded shapes,
dtypes and strides under a fake group, and compares the outcome with the recorded one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fx_fusion.record import Excerpt, SiteRecord, Value
from fx_fusion.report import FusionReport, Reason, SiteReport
from fx_fusion.report_text import outcome_key

#: Reasons whose cause isn't in the ops around the site, and what is missing.
NOT_REPRODUCED: Final[Mapping[Reason, str]] = {
    Reason.INPUT_MUTATED: "the write in place stands elsewhere in the graph",
    Reason.UNKNOWN_SHAPE: "here every shape is known",
    Reason.DEVICE: "here all tensors are on the CPU",
    Reason.GROUP_IS_NODE: "here the group's name is a constant",
    Reason.GROUP_UNKNOWN: "here the group exists",
    Reason.GRADIENT: "here there is no backward graph",
    Reason.KERNEL_UNAVAILABLE: "here the kernel may be available, or another one chosen",
    Reason.NOT_FASTER: "here the site runs on the CPU, where fusion is faster",
    Reason.INTERNAL_ERROR: "it came from the whole graph; its traceback is in the log",
}

#: Ops that torch and fx_fusion bring along.
_KNOWN_OPS: Final = ("aten.", "prims.", "_c10d_functional.", "fx_fusion.")


@dataclass(frozen=True)
class DistinctSite:
    """A site that stands for all sites of its graph that came out the same.

    Attributes:
        site: The first of them.
        record: Its excerpts, None if there are none.
        settings: The graph's settings that differ from their defaults.
        modules: The modules all of them are in.
        count: How many they are.
    """

    site: SiteReport
    record: SiteRecord | None
    settings: Mapping[str, str | bool]
    modules: tuple[str, ...]
    count: int


def distinct_sites(report: FusionReport) -> tuple[list[DistinctSite], list[int | None]]:
    """The distinct sites of a report, and for each of `report.sites` its place among them.

    Sites are told apart graph by graph, as in the report's text. Gradients' all_reduces have no
    place: nothing is to be said of them one by one.
    """
    found: list[DistinctSite] = []
    places: list[int | None] = []
    for graph in report.graphs:
        known: dict[str, int] = {}
        records = graph.record.sites if graph.record is not None else ()
        settings = graph.record.settings if graph.record is not None else {}
        for index, site in enumerate(graph.sites):
            if site.is_gradient:
                places.append(None)
                continue
            place = known.setdefault(outcome_key(site), len(found))
            record = records[index] if index < len(records) else None
            modules = (site.module,) if site.module else ()
            if place == len(found):
                found.append(DistinctSite(site, record, settings, modules, 1))
            else:
                old = found[place]
                modules = tuple(dict.fromkeys((*old.modules, *modules)))
                found[place] = DistinctSite(
                    old.site, old.record or record, settings, modules, old.count + 1
                )
            places.append(place)
    return found, places


def repro_text(report: FusionReport) -> str:
    """The program, one function for each distinct site that could be recorded."""
    sites, _ = distinct_sites(report)
    functions: list[str] = []
    calls: list[str] = []
    left_out: list[str] = []
    for number, distinct in enumerate(sites, start=1):
        missing = _missing(distinct)
        if missing:
            left_out.append(f"#   site {number}: {_comment(missing)}")
            continue
        assert distinct.record is not None
        functions += ["", "", *_function(number, distinct, distinct.record.before)]
        calls += _call(number, distinct, distinct.record)
    parts = [_HEAD.rstrip("\n")]
    if left_out:
        parts += ["", "# Not in this file, as too little of them was recorded:", *left_out]
    parts += functions
    parts += ["", "", "def main() -> int:", f"    {_MAIN_DOC}", "    outcomes = []"]
    parts += [*calls, "    return 0 if all(outcomes) else 1", "", ""]
    parts += ['if __name__ == "__main__":', "    sys.exit(main())", ""]
    return "\n".join(parts)


def _missing(distinct: DistinctSite) -> str:
    if distinct.record is None:
        return "the report was read from JSON or from torch's cache; explain the model anew"
    for line in distinct.record.before.lines:
        if not line.code:
            return f"{line.op} can't be written as a call"
        if not line.op.startswith(_KNOWN_OPS) and "getitem" not in line.op:
            return f"{line.op} is another library's op, which this file doesn't import"
    if distinct.site.world_size is None and distinct.site.reason is not Reason.GROUP_UNKNOWN:
        return "the number of ranks is unknown"
    return ""


def _function(number: int, distinct: DistinctSite, excerpt: Excerpt) -> Iterator[str]:
    names = ", ".join(value.name for value in excerpt.inputs)
    yield f"def site_{number}({names}, group):"
    yield f"    # {_comment(distinct.site.source or 'somewhere in the graph')}"
    if distinct.modules:
        more = f" and {len(distinct.modules) - 1} more" if len(distinct.modules) > 1 else ""
        yield f"    # {_comment(distinct.modules[0])}{more}"
    for line in excerpt.lines:
        yield f"    {line.value.name} = {line.code}"
    # A function without results would be dropped by the compiler.
    yield f"    return {', '.join(excerpt.returns or (excerpt.inputs[0].name,))}"


def _call(number: int, distinct: DistinctSite, record: SiteRecord) -> Iterator[str]:
    site = distinct.site
    reason = None if site.reason is None else site.reason.value
    settings = [f"{name}={value!r}" for name, value in sorted(distinct.settings.items())]
    if record.arch:
        settings.append(f"target=fx_fusion.Target(arch={record.arch!r})")
    why_not = "" if site.reason is None else NOT_REPRODUCED.get(site.reason, "")
    switched = "True" if site.reason is Reason.DISABLED else "False"
    yield f"    with fake_group({site.world_size or 2}) as group, switched_off({switched}):"
    yield "        inputs = ["
    for value in record.before.inputs:
        yield f"            {_tensor(value)},"
    yield "        ]"
    yield f"        explained = fx_fusion.explain(site_{number}{_joined(settings)})"
    yield "        report = explained(*inputs, group.group_name)"
    yield f"    outcomes.append(compare({number}, report, {reason!r}, {why_not!r}))"


def _joined(settings: Sequence[str]) -> str:
    return "".join(f", {setting}" for setting in settings)


def _tensor(value: Value) -> str:
    """A tensor like the recorded one; strides only where they aren't those of a plain one."""
    dynamic = [dim for dim, size in enumerate(value.shape) if isinstance(size, str)]
    text = f"tensor({value.sizes!r}, torch.{value.dtype}"
    if value.strides != _plain_strides(value.sizes):
        text += f", strides={value.strides!r}"
    if dynamic:
        text += f", dynamic={dynamic!r}"
    return f"{text})"


def _plain_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(strides)


def _comment(text: str) -> str:
    """Text of the user's code on one line, so that it can't end the comment."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


_MAIN_DOC: Final = (
    '"""Explain each site; the exit status is 1 if one came out otherwise than expected."""'
)

_HEAD: Final = '''"""The sites of a fx_fusion report, each by itself.

    python repro.py

Written by FusionReport.save. Needs torch and fx_fusion, no GPU, no weights and no other process:
nothing is computed. Sizes that were dynamic have those of the call that was compiled.
"""

from __future__ import annotations

import contextlib
import sys

import torch

import fx_fusion
from fx_fusion.testing import fake_group


def tensor(shape, dtype, strides=None, dynamic=()):
    """A tensor without data."""
    if strides is None:
        made = torch.empty(shape, dtype=dtype, device="meta")
    else:
        made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    for dim in dynamic:
        torch._dynamo.maybe_mark_dynamic(made, dim)
    return made


def switched_off(off):
    """fx_fusion switched off, as it was for a site that reports it."""
    return fx_fusion.disable() if off else contextlib.nullcontext()


def compare(number, report, reason, why_not):
    """Print what became of a site, and whether that was expected."""
    found = [None if site.reason is None else site.reason.value for site in report.sites]
    expected = "fused" if reason is None else f"not fused, {reason}"
    print(f"site {number}, recorded as {expected}:")
    print(report)
    if reason in found:
        print("the same here\\n")
        return True
    if why_not:
        print(f"another outcome here, as can be: {why_not}\\n")
        return True
    print("ANOTHER OUTCOME HERE: this file or another version of torch differs\\n")
    return False
'''

"""What a benchmark's CSV file says, as the lines of a picture; `draw` draws them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fx_fusion.errors import FxFusionError

_Row = Mapping[str, str]
#: Candidates of the kernels benchmark that one line of a picture stands for, the fastest at each
#: size, by the line's name; others have a line of their own, but for those that force an algorithm.
_BEST_OF: Final = {
    "FlashInfer, best variant": (
        "flashinfer one-shot",
        "flashinfer one-shot pdl",
        "flashinfer two-shot",
        "flashinfer two-shot pdl",
    ),
    "unfused, best from any x": ("unfused copy", "unfused one kernel", "unfused two-shot"),
}
_LINE_OF: Final = {name: line for line, names in _BEST_OF.items() for name in names}
_NOT_DRAWN: Final = frozenset(("fx_fusion one-shot", "fx_fusion two-shot"))
#: What a benchmark's own columns are called in a picture.
_NAMES: Final = {
    "fused": "fx_fusion",
    "inductor": "Inductor over gloo",
    "eager": "eager over gloo",
    "transport": "our all_reduce, Inductor's norm",
    "pass_seconds": "the pass of fx_fusion",
    "compile_seconds": "the whole compilation",
}
#: What the name of a candidate of a decode step ends with where a CUDA graph was replayed.
_GRAPH: Final = " graph"
_DECODE_NAMES: Final = {
    "fx_fusion graph": "fx_fusion",
    "inductor graph": "Inductor's own one-shot",
    "nccl graph": "Inductor over NCCL",
    "inductor": "Inductor",
}
#: The columns by which a file without the column `bench` is known.
_KNOWN_BY: Final = {
    "cpu": ("tokens", "hidden", "fused", "inductor", "eager", "transport", "speed_up"),
    "cpu-step": ("tokens", "hidden_size", "layers", "eager", "inductor", "fx_fusion"),
    "decode": ("shape", "candidate", "tokens", "layers", "median", "low", "high"),
    "kernels": ("candidate", "tokens", "hidden_size", "median", "low", "high"),
    "pass-cost": ("layers", "pass_seconds", "compile_seconds", "share"),
}


class ResultsError(FxFusionError, ValueError):
    """A file isn't a benchmark's CSV file, or lacks what a picture needs."""


@dataclass(frozen=True)
class Line:
    """A line of a panel; `low` and `high` are its quartiles, or empty."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One hidden size: times above, ratios below; the first line of times is ours."""

    title: str
    times: tuple[Line, ...]
    ratios: tuple[Line, ...]


@dataclass(frozen=True)
class Picture:
    """All that is drawn."""

    bench: str
    title: str
    x_label: str
    time_label: str
    ratio_label: str
    panels: tuple[Panel, ...]
    caption: str


def read(path: Path) -> Picture:
    """What a benchmark's CSV file says.

    Raises:
        ResultsError: It can't be read, or isn't such a file.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            columns = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ResultsError(f"{path} can't be read as a CSV file: {error}") from error
    if not rows:
        raise ResultsError(f"{path} has no rows; give a file that fx-fusion bench wrote.")
    bench = rows[0].get("bench") or _recognised(columns)
    missing = sorted(set(_KNOWN_BY.get(bench, ())) - set(columns))
    if bench not in _KNOWN_BY or missing:
        what = f"lacks the columns {', '.join(missing)}" if missing else f"has {columns}"
        raise ResultsError(
            f"{path} {what}, so it's no file of a benchmark ({', '.join(_KNOWN_BY)}); give one"
            " that fx-fusion bench wrote with --csv."
        )
    try:
        return _PICTURES[bench](rows)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ResultsError(f"{path} holds a value that is no figure: {error}") from error


def _recognised(columns: Sequence[str]) -> str:
    found = [name for name, known in _KNOWN_BY.items() if set(known) <= set(columns)]
    return found[0] if found else ""


def _grouped(rows: Iterable[_Row], *names: str) -> dict[tuple[str, ...], list[_Row]]:
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in names), []).append(row)
    return groups


def _column(rows: Sequence[_Row], name: str) -> tuple[float, ...]:
    return tuple(float(row[name]) for row in rows)


def _line(
    rows: Sequence[_Row], name: str, x: str, y: str, low: str = "", high: str = ""
) -> Line:
    ordered = sorted(rows, key=lambda row: float(row[x]))
    return Line(
        name,
        _column(ordered, x),
        _column(ordered, y),
        _column(ordered, low) if low else (),
        _column(ordered, high) if high else (),
    )


def _caption(rows: Sequence[_Row]) -> str:
    parts = []
    for values in _grouped(rows, "torch", "machine", "cores", "date", "command"):
        if not any(values):
            return "The file doesn't say on what it was measured."
        torch, machine, cores, date, command = values
        parts.append(f"torch {torch}, {machine}, {cores} cores, {date}: {command}")
    return "; ".join(parts)


def _cpu(rows: Sequence[_Row]) -> Picture:
    panels = []
    for (world_size, dtype, hidden), cells in _grouped(
        rows, "world_size", "dtype", "hidden"
    ).items():
        ours = _line(cells, _NAMES["fused"], "tokens", "fused", "fused_low", "fused_high")
        others = [
            _line(cells, _NAMES[way], "tokens", way)
            for way in ("inductor", "eager", "transport")
        ]
        ratio = _line(cells, "Inductor / fx_fusion", "tokens", "speed_up")
        title = f"hidden size {hidden}, {dtype}, {world_size} ranks"
        panels.append(Panel(title, (ours, *others), (ratio,)))
    return Picture(
        "cpu",
        "all_reduce + residual add + RMSNorm on CPU",
        "tokens",
        "microseconds a call",
        "times faster\nthan Inductor",
        tuple(panels),
        _caption(rows),
    )


def _cpu_step(rows: Sequence[_Row]) -> Picture:
    panels = []
    for (world_size, dtype, layers, hidden), cells in _grouped(
        rows, "world_size", "dtype", "layers", "hidden_size"
    ).items():
        lines = [
            _line(cells, name, "tokens", way)
            for way, name in (
                ("fx_fusion", "fx_fusion"),
                ("inductor", "Inductor"),
                ("eager", "eager"),
            )
        ]
        ratio = _line(cells, "Inductor / fx_fusion", "tokens", "speed_up")
        title = f"{layers} layers of {hidden}, {dtype}, {world_size} ranks"
        panels.append(Panel(title, tuple(lines), (ratio,)))
    return Picture(
        "cpu-step",
        "A step of a Llama-shaped model on CPU",
        "tokens",
        "milliseconds a step",
        "times faster\nthan Inductor",
        tuple(panels),
        _caption(rows),
    )


def _over(ours: Line, others: Iterable[Line]) -> tuple[Line, ...]:
    """How often slower than ours each other line is, where both were measured."""
    own = dict(zip(ours.x, ours.y, strict=True))
    ratios = []
    for line in others:
        shared = [(x, y / own[x]) for x, y in zip(line.x, line.y, strict=True) if x in own]
        xs, ys = tuple(x for x, _ in shared), tuple(y for _, y in shared)
        ratios.append(Line(f"{line.name} / {ours.name}", xs, ys))
    return tuple(ratios)


def _decode(rows: Sequence[_Row]) -> Picture:
    in_graphs = any(row["candidate"].endswith(_GRAPH) for row in rows)
    chosen = [row for row in rows if row["candidate"].endswith(_GRAPH) or not in_graphs]
    panels = []
    for (shape, world_size, dtype, layers), cells in _grouped(
        chosen, "shape", "world_size", "dtype", "layers"
    ).items():
        lines = {
            name: _line(group, _DECODE_NAMES.get(name, name), "tokens", "median", "low", "high")
            for (name,), group in _grouped(cells, "candidate").items()
        }
        ours = lines.pop("fx_fusion" + _GRAPH * in_graphs, None)
        if ours is None:
            raise ValueError("no row of the candidate fx_fusion")
        title = f"{shape}, {layers} layers, {dtype}, {world_size} ranks"
        panels.append(Panel(title, (ours, *lines.values()), _over(ours, lines.values())))
    return Picture(
        "decode",
        f"A decode step{', in CUDA graphs' * in_graphs}",
        "tokens",
        "microseconds a step",
        "times faster",
        tuple(panels),
        _caption(rows),
    )


def _kernels(rows: Sequence[_Row]) -> Picture:
    panels = []
    measured = [
        row
        for row in rows
        if row["median"] != "nan" and row.get("between", "nothing") == "nothing"
    ]
    for (world_size, dtype, hidden), cells in _grouped(
        measured, "world_size", "dtype", "hidden_size"
    ).items():
        by_name: dict[str, dict[str, _Row]] = {}
        for row in cells:
            name = _LINE_OF.get(row["candidate"], row["candidate"])
            best = by_name.setdefault(name, {}).get(row["tokens"])
            if best is None or float(row["median"]) < float(best["median"]):
                by_name[name][row["tokens"]] = row
        lines = {
            name: _line(list(group.values()), name, "tokens", "median", "low", "high")
            for name, group in by_name.items()
            if name not in _NOT_DRAWN
        }
        if "fx_fusion" not in lines:
            raise ValueError("no row of the candidate fx_fusion")
        ours = lines.pop("fx_fusion")
        ratios = _over(ours, lines.values())
        title = f"hidden size {hidden}, {dtype}, {world_size} ranks"
        panels.append(Panel(title, (ours, *lines.values()), ratios))
    return Picture(
        "kernels",
        "all_reduce + residual add + RMSNorm on GPUs, in CUDA graphs",
        "tokens",
        "microseconds an op",
        "times faster",
        tuple(panels),
        _caption(rows),
    )


def _pass_cost(rows: Sequence[_Row]) -> Picture:
    lines = [
        _line(rows, _NAMES[name], "layers", name)
        for name in ("pass_seconds", "compile_seconds")
    ]
    percent = [dict(row) | {"percent": str(100 * float(row["share"]))} for row in rows]
    share = _line(percent, "share of the pass", "layers", "percent")
    return Picture(
        "pass-cost",
        "What the pass adds to a cold compilation",
        "layers",
        "seconds",
        "share of\nthe pass, %",
        (Panel("", tuple(lines), (share,)),),
        _caption(rows),
    )


_PICTURES: Final = {
    "cpu": _cpu,
    "cpu-step": _cpu_step,
    "decode": _decode,
    "kernels": _kernels,
    "pass-cost": _pass_cost,
}

"""Pictures of the graph around a site: boxes from top to bottom, arrows for what reads what.

Standard library alone. `examples/draw_before_after.py` draws with the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from fx_fusion.record import Excerpt, Line, Value

BOX_WIDTH: Final = 330
BOX_HEIGHT: Final = 30
GAP: Final = 16
#: Room to the right of the boxes for each detour of an arrow.
LANE: Final = 12
#: Characters of both texts that fit into a box.
_FITS: Final = 44

#: Fill and border of each kind of node.
COLOURS: Final = {
    "input": ("#f3f4f6", "#9ca3af"),
    "collective": ("#fdecc8", "#c27803"),
    "pointwise": ("#dde8fb", "#4b77c9"),
    "fused": ("#cdeed8", "#1f8a4c"),
}
LEGEND: Final = (
    ("input", "input or result"),
    ("collective", "collective"),
    ("pointwise", "computation on one rank"),
    ("fused", "fx_fusion's op"),
)


@dataclass(frozen=True)
class Box:
    """One node as drawn: its text, its colour and the boxes it reads."""

    name: str
    type: str
    kind: str
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Panel:
    """A column of boxes as SVG elements, and the room they take."""

    elements: str
    width: float
    bottom: float


def kind_of(op: str) -> str:
    """Which colour an op gets, by its name."""
    if op.startswith("fx_fusion"):
        return "fused"
    return "collective" if "c10d" in op else "pointwise"


def count_ops(boxes: Sequence[Box]) -> str:
    """ "12 ops", inputs and results not counted."""
    count = sum(box.kind != "input" for box in boxes)
    return f"{count} op{'s' if count != 1 else ''}"


def excerpt_boxes(excerpt: Excerpt, outputs: Sequence[str] = ()) -> list[Box]:
    """The boxes of an excerpt.

    Args:
        excerpt: Each input is drawn right before what first reads it.
        outputs: What the fused op returns, for the names of the results.
    """
    boxes: list[Box] = []
    place: dict[str, int] = {}
    inputs = {value.name: value for value in excerpt.inputs}
    results = dict(zip(_items(excerpt), outputs, strict=False))
    for line in excerpt.lines:
        for name in line.reads:
            if name in inputs and name not in place:
                place[name] = len(boxes)
                boxes.append(Box(name, type_text(inputs[name]), "input", ()))
        reads = tuple(dict.fromkeys(place[name] for name in line.reads if name in place))
        if _is_item(line) and reads:
            place[line.value.name] = reads[0]
            continue
        place[line.value.name] = len(boxes)
        boxes.append(Box(line.label, type_text(line.value), kind_of(line.op), reads))
    values = {line.value.name: line.value for line in excerpt.lines}
    for name in excerpt.returns:
        label = f"result: {results[name]}" if name in results else "result"
        boxes.append(Box(label, type_text(values[name]), "input", (place[name],)))
    return boxes


def _items(excerpt: Excerpt) -> list[str]:
    """The names of what is taken out of the fused op, in the op's order."""
    fused = [line.value.name for line in excerpt.lines if kind_of(line.op) == "fused"]
    items = [ln for ln in excerpt.lines if _is_item(ln) and ln.reads[:1] == tuple(fused)]
    return [line.value.name for line in sorted(items, key=lambda line: line.label)]


def _is_item(line: Line) -> bool:
    return line.op.endswith("getitem") or "getitem" in line.op


def type_text(value: Value) -> str:
    """ "bf16 16 x 4096"; the dtype alone of a tensor without dimensions."""
    short = value.dtype.replace("bfloat", "bf").replace("float", "f")
    return f"{short} {' x '.join(map(str, value.shape))}".strip()


def draw_panel(boxes: Sequence[Box], left: float, top: float, title: str) -> Panel:
    """Draw one column of boxes with its arrows, under a title."""
    parts = [f'<text class="title" x="{left:g}" y="{top - 22:g}">{escape(title)}</text>']
    tops = [top + i * (BOX_HEIGHT + GAP) for i in range(len(boxes))]
    taken: list[int] = []
    for place, box in enumerate(boxes):
        for source in sorted(box.reads, reverse=True):
            start, end = tops[source] + BOX_HEIGHT, tops[place]
            if source == place - 1:
                middle = left + BOX_WIDTH / 2
                parts.append(f'<path class="arrow" d="M{middle:g} {start:g}V{end - 2:g}"/>')
                continue
            # A detour on the right, in the first lane that is free from there on.
            lane = next((i for i, until in enumerate(taken) if until <= source), len(taken))
            taken[lane : lane + 1] = [place]
            edge = left + BOX_WIDTH
            # Arrows leave low and arrive high, so that the two do not meet.
            out = tops[source] + BOX_HEIGHT - 7
            into = tops[place] + 8 + 5 * sorted(box.reads, reverse=True).index(source)
            turn = edge + 14 + LANE * lane
            parts.append(
                f'<path class="arrow" d="M{edge:g} {out:g}H{turn - 6:g}q6 0 6 6'
                f'V{into - 6:g}q0 6 -6 6H{edge + 2:g}"/>'
            )
    for y, box in zip(tops, boxes, strict=True):
        parts.append(_draw_box(box, left, y))
    width = BOX_WIDTH + 8 + (LANE * len(taken) + 8 if taken else 0)
    return Panel("\n".join(parts), width, (tops[-1] if tops else top) + BOX_HEIGHT)


def _draw_box(box: Box, left: float, top: float) -> str:
    middle = top + BOX_HEIGHT / 2 + 4.5
    name, type_shown = _shortened(box.name, box.type)
    whole = f"{box.name}, {box.type}" if box.type else box.name
    return (
        f'<g><title>{escape(whole)}</title><rect class="{box.kind}"'
        f' x="{left:g}" y="{top:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text class="op" x="{left + 12:g}" y="{middle:g}">{escape(name)}</text>'
        f'<text class="type" x="{left + BOX_WIDTH - 12:g}" y="{middle:g}">'
        f"{escape(type_shown)}</text></g>"
    )


def _shortened(name: str, type_shown: str) -> tuple[str, str]:
    """Both texts, cut where they would run into each other."""
    if len(name) + len(type_shown) <= _FITS:
        return name, type_shown
    if len(type_shown) > _FITS // 2:
        type_shown = type_shown[: _FITS // 2 - 1] + "\u2026"
    room = _FITS - len(type_shown)
    return (name if len(name) <= room else name[: room - 1] + "\u2026"), type_shown


def draw_legend(left: float, bottom: float) -> str:
    """What the colours mean, its last line at `bottom`."""
    parts = []
    for place, (kind, text) in enumerate(LEGEND):
        top = bottom - 24 * (len(LEGEND) - place)
        parts.append(
            f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="22" height="14" rx="3"/>'
            f'<text class="op" x="{left + 32:g}" y="{top + 12:g}">{escape(text)}</text>'
        )
    return "\n".join(parts)


def arrow_tip(colour: str) -> str:
    """The marker at the end of each arrow; once a document."""
    return (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6"'
        f' markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        "</defs>"
    )


def style(*, variables: bool = False) -> str:
    """The style of the elements.

    Args:
        variables: Let the document set the colours ("--input", "--input-border", "--ink",
            "--muted"), as a page with a dark form does. A picture of its own has them fixed.
    """

    def colour(name: str, fixed: str) -> str:
        return f"var(--{name})" if variables else fixed

    lines = [
        'svg text { font-family: ui-sans-serif, "DejaVu Sans", Helvetica, Arial, sans-serif;'
        f" fill: {colour('ink', '#1f2937')} }}",
        "svg .head { font-size: 15px; font-weight: 600 }",
        "svg .title { font-size: 14px; font-weight: 600 }",
        "svg .op { font-size: 13px }",
        "svg .type { font-size: 11.5px; text-anchor: end;"
        f" fill: {colour('muted', '#4b5563')} }}",
        f"svg .arrow {{ fill: none; stroke: {colour('arrow', '#6b7280')};"
        " stroke-width: 1.3; marker-end: url(#tip) }",
    ]
    lines += [
        f"svg .{kind} {{ fill: {colour(kind, fill)}; stroke: {colour(f'{kind}-border', border)} }}"
        for kind, (fill, border) in COLOURS.items()
    ]
    return "\n".join(lines)


def panel_picture(boxes: Sequence[Box], title: str) -> str:
    """One column as an SVG for a page that holds `style` and `arrow_tip`."""
    panel = draw_panel(boxes, 2, 36, title)
    width, height = panel.width + 4, panel.bottom + 4
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        f' role="img" aria-label="{escape(title)}">\n{panel.elements}\n</svg>'
    )

"""Draw the end of a tensor-parallel block before and after the pass, as an SVG.

    python examples/draw_before_after.py [file.svg]

The two graphs are captured from a real compilation for 8 ranks under a fake process group, so
the picture shows what the pass does, not what it should do. The default file is
examples/results/before_after.svg, which the README shows.
"""

from __future__ import annotations

import html
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import fx

from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.testing import fake_group

BOX_WIDTH: Final = 330
BOX_HEIGHT: Final = 30
GAP: Final = 16
LANE: Final = 12
PANEL_WIDTH: Final = 440
TOP: Final = 84

#: Fill and border of each kind of node.
COLOURS: Final = {
    "input": ("#f3f4f6", "#9ca3af"),
    "collective": ("#fdecc8", "#c27803"),
    "pointwise": ("#dde8fb", "#4b77c9"),
    "fused": ("#cdeed8", "#1f8a4c"),
}


#: What `block_end` returns.
RESULTS: Final = ("norm", "residual")

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


def block_end(
    x: torch.Tensor, projection: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How a Llama block ends on each rank, which holds some of the projection's rows."""
    partial = x @ projection
    dist.all_reduce(partial)
    residual = residual + partial
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(residual.dtype), residual


def boxes_of(graph: fx.Graph) -> list[Box]:
    """The nodes worth drawing, in order; results of a tuple are drawn as the op that makes it."""
    names = iter(inspect.signature(block_end).parameters)
    boxes: list[Box] = []
    place: dict[fx.Node, int] = {}
    for node in graph.nodes:
        inputs = tuple(dict.fromkeys(place[n] for n in node.all_input_nodes if n in place))
        if node.op == "output":
            # Each of block_end's results gets a box of its own.
            for name, result in zip(RESULTS, node.args[0], strict=True):
                boxes.append(Box(f"result: {name}", "", "input", (place[result],)))
        if not isinstance(node.meta.get("val"), (torch.Tensor, tuple)) or node.op == "output":
            continue
        if "getitem" in str(node.target):
            place[node] = inputs[0]
            continue
        place[node] = len(boxes)
        name = next(names) if node.op == "placeholder" else label(node)
        boxes.append(Box(name, type_of(node), kind_of(node), inputs))
    return boxes


def label(node: fx.Node) -> str:
    """The op's short name, with the number it takes if it takes one."""
    name = str(node.target).removesuffix(".default").split(".")[1]
    numbers = [f"{arg:.6g}" for arg in node.args if type(arg) in (int, float)]
    return f"{name} {numbers[0]}" if numbers and len(node.args) == 2 else name


def type_of(node: fx.Node) -> str:
    """The dtype and shape of the node's value, or of the first of several."""
    value = node.meta["val"]
    if isinstance(value, tuple):
        value = next(v for v in value if v.numel())
    short = str(value.dtype).removeprefix("torch.").replace("float", "f")
    return f"{short} {' x '.join(str(size) for size in value.shape)}"


def kind_of(node: fx.Node) -> str:
    """Which colour a node gets."""
    target = str(node.target)
    if node.op == "placeholder":
        return "input"
    if target.startswith("fx_fusion"):
        return "fused"
    return "collective" if "c10d" in target else "pointwise"


def draw_panel(boxes: list[Box], left: float, title: str) -> tuple[str, float]:
    """One column of boxes with its arrows, and the height it takes."""
    parts = [f'<text class="title" x="{left}" y="{TOP - 22}">{html.escape(title)}</text>']
    tops = [TOP + i * (BOX_HEIGHT + GAP) for i in range(len(boxes))]
    taken: list[int] = []
    for place, box in enumerate(boxes):
        for source in sorted(box.reads, reverse=True):
            start, end = tops[source] + BOX_HEIGHT, tops[place]
            if source == place - 1:
                middle = left + BOX_WIDTH / 2
                parts.append(f'<path class="arrow" d="M{middle} {start}V{end - 2}"/>')
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
                f'<path class="arrow" d="M{edge} {out}H{turn - 6}q6 0 6 6'
                f'V{into - 6}q0 6 -6 6H{edge + 2}"/>'
            )
    for top, box in zip(tops, boxes, strict=True):
        fill, border = COLOURS[box.kind]
        middle = top + BOX_HEIGHT / 2 + 4.5
        parts.append(
            f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"'
            f' fill="{fill}" stroke="{border}"/>'
            f'<text class="op" x="{left + 12}" y="{middle}">{html.escape(box.name)}</text>'
            f'<text class="type" x="{left + BOX_WIDTH - 12}" y="{middle}">{box.type}</text>'
        )
    return "\n".join(parts), tops[-1] + BOX_HEIGHT


def ops(boxes: list[Box]) -> str:
    """ "12 ops", inputs not counted."""
    count = sum(box.kind != "input" for box in boxes)
    return f"{count} op{'s' if count != 1 else ''}"


def draw_legend(left: float, bottom: float) -> str:
    """What the colours mean, its last line at `bottom`."""
    parts = []
    for place, (kind, text) in enumerate(LEGEND):
        fill, border = COLOURS[kind]
        top = bottom - 24 * (len(LEGEND) - place)
        parts.append(
            f'<rect x="{left}" y="{top}" width="22" height="14" rx="3" fill="{fill}"'
            f' stroke="{border}"/><text class="op" x="{left + 32}" y="{top + 12}">'
            f"{html.escape(text)}</text>"
        )
    return "\n".join(parts)


def draw(before: list[Box], after: list[Box]) -> str:
    """The whole picture as SVG text."""
    left, height_left = draw_panel(before, 24, f"before: {ops(before)}")
    right, height_right = draw_panel(after, 24 + PANEL_WIDTH, f"after: {ops(after)}")
    legend = draw_legend(24 + PANEL_WIDTH, max(height_left, height_right) + 10)
    width, height = 2 * PANEL_WIDTH + 24, max(height_left, height_right) + 24
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" \
width="{width}" height="{height:g}" role="img" aria-label="The graph before and after the pass">
<style>
text {{ font-family: ui-sans-serif, "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2937 }}
.head {{ font-size: 15px; font-weight: 600 }}
.title {{ font-size: 14px; font-weight: 600 }}
.op {{ font-size: 13px }}
.type {{ font-size: 11.5px; text-anchor: end; fill: #4b5563 }}
.arrow {{ fill: none; stroke: #6b7280; stroke-width: 1.3; marker-end: url(#tip) }}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" \
orient="auto"><path d="M0 0L8 4L0 8z" fill="#6b7280"/></marker></defs>
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1:g}" rx="10" fill="#ffffff" \
stroke="#d1d5db"/>
<text class="head" x="24" y="32">The end of a Llama block on one of 8 tensor-parallel ranks, \
as torch.compile sees it</text>
{left}
{right}
{legend}
</svg>
"""


class Recorder(FusionPass):
    """The pass, keeping what its graph looked like before and after."""

    before: list[Box]
    after: list[Box]

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        """Fuse in place."""
        self.before = boxes_of(graph)
        super().__call__(graph, is_inference)
        self.after = boxes_of(graph)

    def uuid(self) -> str:
        """Never the same: from a cache, the graph would come without a call of the pass."""
        return uuid4().hex


def main() -> None:
    """Compile `block_end`, draw what the pass saw and left, write the file."""
    default = Path(__file__).parent / "results" / "before_after.svg"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    recorder = Recorder()
    shapes = ((16, 512), (512, 4096), (16, 4096), (4096,))
    with fake_group(world_size=8):
        compiled = torch.compile(block_end, options={"post_grad_custom_post_pass": recorder})
        compiled(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes))
    path.write_text(draw(recorder.before, recorder.after), encoding="utf-8")
    print(f"{path}: {ops(recorder.before)} before, {ops(recorder.after)} after")


if __name__ == "__main__":
    main()

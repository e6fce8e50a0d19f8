"""Draw the end of a tensor-parallel block before and after the pass, as an SVG.

    python examples/draw_before_after.py [file.svg]

The two graphs are captured from a real compilation for 8 ranks under a fake process group, so
the picture shows what the pass does, not what it should do. The default file is
examples/results/before_after.svg, which the README shows.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import fx

from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.report_svg import (
    Box,
    arrow_tip,
    count_ops,
    draw_legend,
    draw_panel,
    kind_of,
    style,
)
from fx_fusion.testing import fake_group

PANEL_WIDTH: Final = 440
TOP: Final = 84

#: What `block_end` returns.
RESULTS: Final = ("norm", "residual")


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
        kind = "input" if node.op == "placeholder" else kind_of(str(node.target))
        boxes.append(Box(name, type_of(node), kind, inputs))
    return boxes


def label(node: fx.Node) -> str:
    """The op's short name, with the number it takes if it takes one."""
    name = str(node.target).removesuffix(".default").split(".")[1]
    name = name.removesuffix("_with_residual")  # the same op, as Inductor is offered it
    numbers = [f"{arg:.6g}" for arg in node.args if type(arg) in (int, float)]
    return f"{name} {numbers[0]}" if numbers and len(node.args) == 2 else name


def type_of(node: fx.Node) -> str:
    """The dtype and shape of the node's value, or of the first of several."""
    value = node.meta["val"]
    if isinstance(value, tuple):
        value = next(v for v in value if v.numel())
    short = str(value.dtype).removeprefix("torch.").replace("float", "f")
    return f"{short} {' x '.join(str(size) for size in value.shape)}"


def draw(before: list[Box], after: list[Box]) -> str:
    """The whole picture as SVG text."""
    left = draw_panel(before, 24, TOP, f"before: {count_ops(before)}")
    right = draw_panel(after, 24 + PANEL_WIDTH, TOP, f"after: {count_ops(after)}")
    bottom = max(left.bottom, right.bottom)
    legend = draw_legend(24 + PANEL_WIDTH, bottom + 10)
    width, height = 2 * PANEL_WIDTH + 24, bottom + 24
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" \
width="{width}" height="{height:g}" role="img" aria-label="The graph before and after the pass">
<style>
{style()}
</style>
{arrow_tip("#6b7280")}
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1:g}" rx="10" fill="#ffffff" \
stroke="#d1d5db"/>
<text class="head" x="24" y="32">The end of a Llama block on one of 8 tensor-parallel ranks, \
as torch.compile sees it</text>
{left.elements}
{right.elements}
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
    print(f"{path}: {count_ops(recorder.before)} before, {count_ops(recorder.after)} after")


if __name__ == "__main__":
    main()

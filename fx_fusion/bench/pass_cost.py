"""What the pass costs a compilation: its time beside Inductor's own, by the number of layers.

    python -m fx_fusion.bench.pass_cost --layers 1,8,32,80

Compiles a Llama-shaped decoder (attention, gated MLP, two RMSNorms a layer, an all_reduce behind
each block) under a fake process group, cold, in one process. The pass takes part once a graph;
its share has to stay below one percent and its time linear in the layers.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn

from fx_fusion.bench import common
from fx_fusion.bench.common import Bench, Table, add_numbers, count_cell
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.testing import fake_group

HIDDEN: Final = 256
HEADS: Final = 4


class Layer(nn.Module):
    """One decoder layer of one rank: row-parallel outputs are reduced over the group."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make the layer's weights; `reduce` sums over the group."""
        super().__init__()
        self.reduce = reduce
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.attention_norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.mlp_norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[batch, tokens, hidden size] in and out."""
        normed = self.attention_norm(hidden)
        batch, tokens, _ = normed.shape
        parts = self.qkv(normed).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = (part * cos + part.roll(1, -1) * sin for part in parts[:2])
        mixed = nn.functional.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, HIDDEN)
        hidden = hidden + self.reduce(self.out(mixed))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        return hidden + self.reduce(self.down(nn.functional.silu(gate) * up))


class TimedPass(FusionPass):
    """The pass with a clock around it."""

    seconds = 0.0
    fused = 0

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Run the pass; add up what it took."""
        start = time.perf_counter()
        super().__call__(graph, is_inference)
        self.seconds += time.perf_counter() - start
        self.fused += sum("all_reduce_add_rms_norm" in str(node.target) for node in graph.nodes)

    def uuid(self) -> None:  # type: ignore[override]
        """None, so that nothing comes from the compile cache."""


def measure(layers: int) -> tuple[float, float, int]:
    """Seconds of the pass, seconds of the whole compilation, sites fused."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    with fake_group(8), torch.no_grad():
        group = dist.group.WORLD

        def reduce(x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, cast(Any, funcol).all_reduce(x, "sum", group))

        stack = nn.ModuleList(Layer(reduce) for _ in range(layers)).to(torch.bfloat16)
        norm = nn.RMSNorm(HIDDEN, eps=1e-6).to(torch.bfloat16)

        def model(hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            for layer in stack:
                hidden = layer(hidden, cos, sin)
            return cast(torch.Tensor, norm(hidden))

        torch._dynamo.reset()
        timed = TimedPass()
        compiled = torch.compile(model, options={"post_grad_custom_post_pass": timed})
        inputs = [torch.randn(1, 8, n, dtype=torch.bfloat16) for n in (HIDDEN, 64, 64)]
        start = time.perf_counter()
        with _no_word_on_the_path():
            compiled(*inputs)
        return timed.seconds, time.perf_counter() - start, timed.fused


@contextlib.contextmanager
def _no_word_on_the_path() -> Iterator[None]:
    """Don't let the op warn that a fake group can't run the kernel: only compiling is timed."""
    log = logging.getLogger("fx_fusion.lowering")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@dataclass(frozen=True)
class Row:
    """One number of layers: seconds of the pass and of the whole compilation, and its share."""

    layers: int
    sites: int
    pass_seconds: float
    compile_seconds: float
    share: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    add_numbers(parser, "--layers", default=(1, 8, 32, 80), what="decoder layers")


def run(options: argparse.Namespace, progress: str = "") -> list[Row]:
    """Compile every number of layers, in this process."""
    measure(1)  # loads what is loaded once
    rows = []
    for layers in options.layers:
        seconds, total, fused = measure(layers)
        rows.append(
            Row(layers, fused, round(seconds, 4), round(total, 2), round(seconds / total, 5))
        )
        count_cell(progress)
    return rows


def table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """One line for each number of layers."""
    return Table(
        f"seconds of a cold compilation of {len(options.layers)} Llama-shaped models, and of the"
        f" pass in it, torch {torch.__version__}",
        ("layers", "sites", "pass s", "compile s", "share"),
        tuple(
            (
                str(row.layers),
                str(row.sites),
                f"{row.pass_seconds:.3f}",
                f"{row.compile_seconds:.1f}",
                f"{100 * row.share:.2f}%",
            )
            for row in rows
        ),
    )


BENCH: Final = Bench(
    name="pass-cost",
    module="pass_cost",
    summary="What the pass adds to a compilation, by the number of layers.",
    add_options=add_options,
    cells=lambda options: len(options.layers),
    run=run,
    table=table,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; see `--help` for the options."""
    return common.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())

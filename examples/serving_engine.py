"""fx_fusion inside a serving engine's compile config.

    python examples/serving_engine.py
    torchrun --nproc-per-node 8 examples/serving_engine.py

Engines compile with Inductor options of their own and custom passes in them. inductor_options()
adds fx_fusion to such a dict and keeps the rest; the engine needs no line of code for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from launch import compare, fused_report, random_tensor, run
from plain_block import HIDDEN, Block
from torch import nn

import fx_fusion


@dataclass(frozen=True)
class CompileConfig:
    """How the engine compiles: what most of them have in one form or another."""

    inductor_options: Mapping[str, Any] = field(default_factory=dict)
    warm_up_tokens: tuple[int, ...] = (64, 2)


class Engine:
    """Compiles its model once, warms it up, then serves batches of any size."""

    def __init__(self, model: nn.Module, config: CompileConfig, device: torch.device) -> None:
        """Compile and warm up, before any request is there."""
        self.model, self.device = model, device
        self.run = torch.compile(
            model, fullgraph=True, dynamic=True, options=dict(config.inductor_options)
        )
        for tokens in config.warm_up_tokens:
            self.step(torch.zeros(tokens, HIDDEN, device=device))

    @torch.no_grad()
    def step(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One batch: [tokens, hidden size]."""
        output: tuple[torch.Tensor, torch.Tensor] = self.run(hidden, hidden)
        return output


def example(device: torch.device) -> str:
    """Start an engine, check at start-up that it fuses, serve batches of several sizes."""
    of_the_engine = {"max_autotune": False, "size_asserts": False}
    config = CompileConfig(fx_fusion.inductor_options(of_the_engine))
    engine = Engine(Block(device), config, device)
    # The place to fail: not fused means slower, and nobody would notice later.
    text = fused_report(1)
    graphs = len(fx_fusion.reports())
    lines = []
    for tokens in (2, 7, 48):
        hidden = random_tensor(tokens, HIDDEN, device=device, seed=tokens)
        with torch.no_grad():
            expected = engine.model(hidden, hidden)
        lines.append(f"{tokens} tokens: {compare(engine.step(hidden), expected)}")
    assert len(fx_fusion.reports()) == graphs, "a request had to wait for a compilation"
    return "\n".join([text, *lines])


def main() -> int:
    """Run the example on every rank."""
    return run(example)


if __name__ == "__main__":
    sys.exit(main())

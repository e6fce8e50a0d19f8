"""A training step of a tensor-parallel block: forward fused, gradients as in eager.

    python examples/training_step.py
    torchrun --nproc-per-node 8 examples/training_step.py

torch.compile makes two graphs of it. The forward's all_reduce leads to the norm and is fused; the
backward's belongs to a gradient and is left alone.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from launch import compare, fused_report, random_tensor, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

HIDDEN, INNER, TOKENS = 128, 256, 16


class Block(nn.Module):
    """Norm, MLP, residual, norm; knows nothing of ranks."""

    def __init__(self) -> None:
        """Make the whole weights."""
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.first, self.last = (nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(2))

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] in, the loss of the step out."""
        x = self.first(residual)
        residual = residual + self.down(nn.functional.silu(self.up(x)))
        normed: torch.Tensor = self.last(residual)
        return normed.pow(2).mean() + residual.mean()


def step(block: Any, called: Any, residual: torch.Tensor) -> list[torch.Tensor]:
    """One step of plain SGD; the loss, and this rank's weights afterwards."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    loss = called(residual)
    loss.backward()
    optimizer.step()
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in block.parameters()]
    return [loss.detach(), *(weight.detach() for weight in weights)]


def example(device: torch.device) -> str:
    """Take the same step eagerly and compiled."""
    torch.manual_seed(0)  # the same weights on every rank
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    block = parallelize_module(Block().to(device), mesh, plan)
    twin = copy.deepcopy(block)
    residual = random_tensor(TOKENS, HIDDEN, device=device, seed=100)
    expected = step(twin, twin, residual)
    given = step(block, torch.compile(block, backend="fx_fusion"), residual)
    return f"{fused_report(1)}\nloss and new weights: {compare(given, expected)}"


def main() -> int:
    """Run the example on every rank."""
    return run(example)


if __name__ == "__main__":
    sys.exit(main())

"""A Llama-like MLP block made tensor-parallel by torch's own parallelize_module (DTensor).

    python examples/dtensor_block.py
    torchrun --nproc-per-node 8 examples/dtensor_block.py

The all_reduce is nowhere in the model's code: RowwiseParallel puts it behind `down`.
"""

from __future__ import annotations

import sys

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
    """A gated MLP with its residual and the norm behind it; knows nothing of ranks."""

    def __init__(self) -> None:
        """Make the whole weights; parallelize_module leaves each rank its part."""
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, hidden size] in and out."""
        residual = residual + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.norm(residual), residual


@torch.no_grad()
def example(device: torch.device) -> str:
    """Parallelize and compile the block, compare with eager."""
    torch.manual_seed(0)  # the same weights on every rank
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    block = parallelize_module(Block().to(device), mesh, plan)
    x = random_tensor(TOKENS, HIDDEN, device=device, seed=100)
    residual = random_tensor(TOKENS, HIDDEN, device=device, seed=101)
    compiled = torch.compile(block, backend="fx_fusion")
    difference = compare(compiled(x, residual), block(x, residual))
    return f"{fused_report(1)}\n{difference}"


def main() -> int:
    """Run the example on every rank."""
    return run(example)


if __name__ == "__main__":
    sys.exit(main())

"""A tensor-parallel MLP block in plain torch: dist.all_reduce, residual, RMSNorm.

python examples/plain_block.py                            # two processes on this machine
torchrun --nproc-per-node 8 examples/plain_block.py       # a GPU for each, where there are 8
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import compare, fused_report, random_tensor, run
from torch import nn

HIDDEN, INNER, TOKENS = 128, 256, 16


class Block(nn.Module):
    """Each rank holds some of `up`'s columns and the same of `down`'s rows."""

    def __init__(self, device: torch.device) -> None:
        """Make this rank's part of the weights."""
        super().__init__()
        rank = dist.get_rank()
        self.up = random_tensor(HIDDEN, INNER, device=device, seed=2 * rank)
        self.down = random_tensor(INNER, HIDDEN, device=device, seed=2 * rank + 1)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6, device=device)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, hidden size] in and out: the next block's input, and the residual stream."""
        partial = F.silu(x @ self.up) @ self.down
        dist.all_reduce(partial)  # what every tensor-parallel block ends with
        residual = residual + partial
        return self.norm(residual), residual


@torch.no_grad()
def example(device: torch.device) -> str:
    """Compile the block, run it, compare with eager."""
    block = Block(device)
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

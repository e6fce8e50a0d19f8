"""`@fx_fusion.compile` on a forward: no torch.compile call where the model is used.

    python examples/decorated_forward.py
    torchrun --nproc-per-node 8 examples/decorated_forward.py

With dynamic=True one compiled graph serves every number of tokens.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from launch import compare, fused_report, random_tensor, run
from torch import nn

import fx_fusion

HIDDEN = 128


class BlockEnd(nn.Module):
    """The end of a block: output projection, all_reduce, residual, Llama's RMSNorm."""

    def __init__(self, device: torch.device) -> None:
        """Make this rank's rows of the projection."""
        super().__init__()
        self.projection = random_tensor(64, HIDDEN, device=device, seed=dist.get_rank())
        self.weight = nn.Parameter(torch.ones(HIDDEN, device=device))

    def plain(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, 64] and [tokens, hidden size] in; the norm and the new residual out."""
        group = dist.group.WORLD
        assert group is not None
        residual = residual + funcol.all_reduce(x @ self.projection, "sum", group)
        wide = residual.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(residual.dtype), residual

    @fx_fusion.compile(dynamic=True)
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `plain` computes, compiled."""
        return self.plain(x, residual)


@torch.no_grad()
def example(device: torch.device) -> str:
    """Call it with several numbers of tokens, compare each with eager."""
    block = BlockEnd(device)
    lines = []
    for tokens in (5, 16, 33):
        x = random_tensor(tokens, 64, device=device, seed=100)
        residual = random_tensor(tokens, HIDDEN, device=device, seed=101)
        lines.append(
            f"{tokens} tokens: {compare(block(x, residual), block.plain(x, residual))}"
        )
    assert len(fx_fusion.reports()) == 1, "one graph was to serve every number of tokens"
    return "\n".join([fused_report(1), *lines])


def main() -> int:
    """Run the example on every rank."""
    return run(example)


if __name__ == "__main__":
    sys.exit(main())

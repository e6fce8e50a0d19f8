"""Several ranks on one GPU, to try tensor parallelism on a machine that has no more.

    python examples/ranks_on_one_gpu.py        # on the CPU where there is no GPU

`fx_fusion.testing.spawn` starts the ranks with gloo, since NCCL refuses two ranks on one GPU.
They take turns on the GPU: good for finding out whether it works, never for measuring.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from plain_block import HIDDEN, TOKENS, Block

import fx_fusion
from fx_fusion.testing import spawn

RANKS = 2


@torch.no_grad()
def on_rank(rank: int, world_size: int, kind: str) -> tuple[str, float]:
    """What runs on each rank: compile a block, compare it with eager."""
    device = torch.device("cpu")
    if kind == "cuda":  # every rank is on GPU 0, also where there are more
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    block = Block(device)
    torch.manual_seed(0)  # the same inputs on all ranks
    x, residual = (torch.randn(TOKENS, HIDDEN).to(device) for _ in range(2))
    compiled = torch.compile(block, backend="fx_fusion")
    pairs = zip(compiled(x, residual), block(x, residual), strict=True)
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    report = fx_fusion.FusionReport.merged(fx_fusion.reports())
    where = f"rank {rank} of {world_size} on {device}, backend {dist.get_backend()}"
    return f"{where}\n{report}", difference if report.fused_count else float("inf")


def main() -> int:
    """Start the ranks, print what rank 0 fused, check all of them."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    results = spawn(on_rank, RANKS, device=kind, timeout=600, args=(kind,))
    print(results[0][0])
    largest = max(difference for _, difference in results)
    print(f"largest difference from eager on any rank: {largest:.2e}")
    return 0 if largest < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())

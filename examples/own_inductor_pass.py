"""Your own Inductor pass beside fx_fusion's: both run, yours first.

    python examples/own_inductor_pass.py
    torchrun --nproc-per-node 8 examples/own_inductor_pass.py

This model clamps what it has reduced to fp16's range, as code made for fp16 does, and the clamp
keeps the site from being fused. Other dtypes have no need of it; the pass takes it out there.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import compare, fused_report, random_tensor, run
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import fx_fusion

HIDDEN, TOKENS = 128, 16
LIMIT = 65504.0  # the largest fp16 number
aten = torch.ops.aten
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


class DropClamps(CustomGraphPass):
    """Removes clamps to fp16's range from tensors of another dtype."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place, as Inductor wants it."""
        for node in list(graph.nodes):
            if node.target not in CLAMPS or node.meta["val"].dtype == torch.float16:
                continue
            source, *bounds = node.args
            if all(bound in (-LIMIT, LIMIT) for bound in bounds):
                node.replace_all_uses_with(source)
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """Part of the compile cache's key; without one nothing would be cached."""
        return get_hash_for_files((__file__,))


def block_end(
    x: torch.Tensor, projection: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 64] and [tokens, hidden size] in; the norm and the new residual out."""
    partial = x @ projection
    dist.all_reduce(partial)
    residual = residual + torch.clamp(partial, -LIMIT, LIMIT)
    return F.rms_norm(residual, (HIDDEN,), None, 1e-6), residual


@torch.no_grad()
def example(device: torch.device) -> str:
    """Compile with both passes, compare with eager."""
    x = random_tensor(TOKENS, 64, device=device, seed=100)
    projection = random_tensor(64, HIDDEN, device=device, seed=dist.get_rank())
    residual = random_tensor(TOKENS, HIDDEN, device=device, seed=101)
    inputs = x, projection, residual
    without = fx_fusion.explain(block_end)(*inputs)
    # What is in the slot already stays there; fx_fusion is added behind it.
    mine = {"post_grad_custom_post_pass": DropClamps()}
    compiled = torch.compile(block_end, options=fx_fusion.inductor_options(mine))
    difference = compare(compiled(*inputs), block_end(*inputs))
    return f"without the pass: {without}\n\nwith it: {fused_report(1)}\n{difference}"


def main() -> int:
    """Run the example on every rank."""
    return run(example)


if __name__ == "__main__":
    sys.exit(main())

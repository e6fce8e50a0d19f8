"""A test to copy into your project: the graph of your block, as text, before and after.

    python -m pytest examples/test_block_snapshot.py
    python examples/test_block_snapshot.py

If a change of the model, of torch or of fx_fusion alters what is fused, the test shows where. It
needs no GPU and no second process. expecttest writes such texts for you.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import fake_group, graph_snapshot

#: What the block is after the pass: one op, and its two results.
AFTER = """\
p0: bf16[16, 32]
p1: bf16[32, 64]
p2: bf16[16, 64]
n0: bf16[16, 64] = aten.mm(p0, p1)
n1 = fx_fusion.all_reduce_add_rms_norm(n0, residual=p2, eps=1e-06, group_name='0', world_size=8, \
weight_form='none', want_residual=True)
n2: bf16[16, 64] = n1[0]
n3: bf16[16, 64] = n1[1]
return (n2, n3)"""


def block_end(
    x: torch.Tensor, projection: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put your own block here."""
    partial = x @ projection
    dist.all_reduce(partial)
    residual = residual + partial
    return F.rms_norm(residual, (64,), None, 1e-6), residual


def inputs() -> tuple[torch.Tensor, ...]:
    """Tensors as the block gets them; only their shapes and dtypes matter."""
    shapes = (16, 32), (32, 64), (16, 64)
    return tuple(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)


def test_the_block_is_one_op_after_the_pass() -> None:
    """The whole graph, word for word."""
    with fake_group(8), torch.no_grad():
        assert graph_snapshot(block_end, *inputs()) == AFTER


def test_every_all_reduce_is_fused() -> None:
    """The weaker test, which survives changes elsewhere in the model."""
    with fake_group(8), torch.no_grad():
        report = fx_fusion.explain(block_end)(*inputs())
    assert report.fused_count == report.site_count == 1, str(report)


def main() -> int:
    """Run the tests of this file."""
    return int(pytest.main([__file__, "-q"]))


if __name__ == "__main__":
    sys.exit(main())

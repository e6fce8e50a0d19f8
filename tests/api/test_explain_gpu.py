"""explain with tensors on a GPU: nothing is run there, and no memory is taken."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fx_fusion
from fx_fusion.testing import fake_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]

HIDDEN = 64


class Layer(nn.Module):
    """One site, and a graph break in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        y = self.projection(x)
        dist.all_reduce(y)
        normed: torch.Tensor = self.norm(x + y)
        return normed


@pytest.mark.parametrize("grad", [False, True])
def test_no_gpu_memory_is_allocated(grad: bool) -> None:
    with fake_group(2), torch.set_grad_enabled(grad):
        model, x = Layer().cuda(), torch.ones(4, HIDDEN, device="cuda")
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        report = fx_fusion.explain(model)(x)
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert report.fused_count == 1
    assert after == before

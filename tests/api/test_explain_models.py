"""explain on whole models: DTensor's tensor parallelism, a Llama's blocks, 80 layers."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fx_fusion
from fx_fusion import Target
from fx_fusion.testing import fake_group

WORLD_SIZE = 8


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_group(WORLD_SIZE):
        yield


class LlamaNorm(nn.Module):
    """RMSNorm as transformers spells it for Llama."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Mlp(nn.Module):
    """This rank's share of an MLP, or the whole of it; reduces by itself if told to."""

    def __init__(self, size: int, inner: int, reduces: bool) -> None:
        super().__init__()
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)
        self.reduces = reduces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.up(x)))
        if self.reduces:
            dist.all_reduce(y)
        return y


class Block(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self, size: int, inner: int, reduces: bool) -> None:
        super().__init__()
        self.norm = LlamaNorm(size)
        self.mlp = Mlp(size, inner, reduces)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


class Model(nn.Module):
    """Blocks and a last norm: a site for each block."""

    def __init__(self, layers: int, size: int, inner: int, reduces: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(size, inner, reduces) for _ in range(layers))
        self.norm = LlamaNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        normed: torch.Tensor = self.norm(x)
        return normed


def test_eighty_layers_of_a_machine_that_is_not_here_need_little_memory() -> None:
    with torch.device("meta"):
        model = Model(80, 8192, 28672 // WORLD_SIZE).to(torch.bfloat16)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weights > 8 * 2**30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.zeros(1, 4, 8192, dtype=torch.bfloat16)
    with torch.no_grad():
        report = fx_fusion.explain(model, target=Target("sm_90", WORLD_SIZE))(x)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (report.fused_count, report.site_count) == (80, 80)
    assert grown < 2**20  # KiB, so a gigabyte
    # One line of source, so one block of text for all layers but the last.
    assert "79 times" in str(report)
    assert len(str(report).splitlines()) < 20


def sharded(model: Model) -> Model:
    """The model, made tensor-parallel by DTensor."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        assert isinstance(layer, Block)
        parallelize_module(layer.mlp, mesh, plan)
    return model


@pytest.mark.parametrize("dynamic", [False, True])
def test_dtensor_s_rowwise_layers_are_sites(dynamic: bool) -> None:
    model = sharded(Model(2, 32, 64, reduces=False))
    weights = list(model.parameters())
    with torch.no_grad():
        report = fx_fusion.explain(model, dynamic=dynamic)(torch.ones(2, 4, 32))
    assert (report.fused_count, report.site_count) == (2, 2)
    assert [site.world_size for site in report.sites] == [WORLD_SIZE] * 2
    assert all(now is old for now, old in zip(model.parameters(), weights, strict=True))


def test_dtensor_s_training_step_fuses_its_forward_graph() -> None:
    model = sharded(Model(2, 32, 64, reduces=False))
    report = fx_fusion.explain(model)(torch.ones(2, 4, 32))
    assert [graph.kind for graph in report.graphs] == ["forward", "backward"]
    assert (report.fused_count, report.site_count) == (2, 2)
    assert all(parameter.grad is None for parameter in model.parameters())

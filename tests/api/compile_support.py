"""What the tests of the ways in share: a small layer, and eyes on what Inductor is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import fx, nn

from fx_fusion.passes import pipeline

HIDDEN = 32
#: Inductor's options under which C++ compiles sooner: no vector code, no trial of it.
QUICK: dict[str, Any] = {"cpp.vec_isa_ok": False}
FUSED_OP = "fx_fusion.all_reduce_add_rms_norm.default"
ALL_REDUCE = "_c10d_functional.all_reduce.default"


def reduced(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over the default group."""
    group = dist.group.WORLD
    assert group is not None
    result: torch.Tensor = funcol.all_reduce(x, "sum", group)
    return result


def layer(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One site: all_reduce, residual, norm."""
    hidden = reduced(x) + residual
    return F.rms_norm(hidden, (HIDDEN,), weight, 1e-6), hidden


def inputs(requires_grad: bool = False, tokens: int = 4) -> list[torch.Tensor]:
    """Seeded arguments for `layer`."""
    torch.manual_seed(0)
    shapes = [(tokens, HIDDEN), (tokens, HIDDEN), (HIDDEN,)]
    return [torch.randn(shape).requires_grad_(requires_grad) for shape in shapes]


class Block(nn.Module):
    """A row-parallel projection, its residual and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Project, sum over ranks, add and normalise."""
        hidden = reduced(self.projection(x)) + residual
        normed: torch.Tensor = self.norm(hidden)
        return normed


def targets(graph: fx.Graph) -> list[str]:
    """The names of the ops in a graph, in order."""
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@contextmanager
def fused_graphs() -> Iterator[list[list[str]]]:
    """Within the block, note the ops of each graph after our pass has been over it."""
    graphs: list[list[str]] = []
    real: Callable[..., Any] = pipeline.fuse_graph

    def watched(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        report = real(graph, *args, **kwargs)
        graphs.append(targets(graph))
        return report

    setattr(pipeline, "fuse_graph", watched)  # noqa: B010
    try:
        yield graphs
    finally:
        setattr(pipeline, "fuse_graph", real)  # noqa: B010


def counts(ops: list[str]) -> tuple[int, int]:
    """How many fused ops and how many all_reduces there are."""
    return ops.count(FUSED_OP), ops.count(ALL_REDUCE)

"""What the snapshot tests share: a group of 8 ranks, inputs, and both texts of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx

from fx_fusion.graph_text import graph_text
from fx_fusion.testing import fake_group, graph_snapshot

TOKENS, HIDDEN = 4, 8


class SnapshotTest(expecttest.TestCase):
    """Runs each test with a default group of 8 ranks, of which only this one exists."""

    def setUp(self) -> None:
        super().setUp()
        group = fake_group(8)
        group.__enter__()
        self.addCleanup(group.__exit__, None, None, None)


def reduced(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over the default group."""
    group = dist.group.WORLD
    assert group is not None
    result: torch.Tensor = funcol.all_reduce(x, "sum", group)
    return result


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor [TOKENS, HIDDEN], or of another shape; only its metadata counts."""
    return torch.ones(shape or (TOKENS, HIDDEN), dtype=dtype)


def before_and_after(
    fn: Callable[..., Any], *args: Any, kind: str = "inference", **settings: Any
) -> str:
    """The graph as the pass finds it and as it leaves it; gradients only in a training step."""
    texts: list[str] = []

    def look(graph: fx.Graph) -> None:
        texts.append(graph_text(graph))

    options = {"post_grad_custom_post_pass": look}
    with torch.set_grad_enabled(kind != "inference"):
        after = graph_snapshot(fn, *args, kind=kind, options=options, **settings)
    # In training the forward graph comes first.
    before = texts[-1] if kind == "backward" else texts[0]
    if after == before:
        return f"{before}\n# left as it is"
    return f"{before}\n# becomes\n{after}"


class NormSnapshotTest(SnapshotTest):
    """For norms given as `norm(hidden, weight)`."""

    def snapshot(
        self,
        norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        dtype: torch.dtype = torch.bfloat16,
    ) -> str:
        """Both texts of a site that ends in this norm and returns the hidden state too."""

        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> object:
            hidden = residual + reduced(x)
            return norm(hidden, weight), hidden

        inputs = ones(dtype=dtype), ones(dtype=dtype), ones(HIDDEN, dtype=dtype)
        return before_and_after(fn, *inputs)

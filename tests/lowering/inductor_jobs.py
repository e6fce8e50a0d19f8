"""What runs on the ranks in the tests of the Inductor lowering."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graph_caches import compile_every_graph_again
from torch._inductor.utils import run_and_get_code

from fx_fusion.lowering import inductor
from fx_fusion.passes import pipeline

HIDDEN = 96


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, funcol).all_reduce(x, "sum", dist.group.WORLD))


def two_sites_and_a_plain_one(
    x: torch.Tensor, z: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Two independent sites, and between them an all_reduce that stays as it is."""
    h = residual + all_reduce(x)
    a = torch.nn.functional.rms_norm(h, (HIDDEN,), weight, 1e-6)
    plain = all_reduce(x.relu()).sin()
    k = residual + all_reduce(z)
    return a, torch.nn.functional.rms_norm(k, (HIDDEN,), weight, 1e-6), plain, h


def inputs(rank: int, call: int, tokens: int) -> tuple[torch.Tensor, ...]:
    own = torch.Generator().manual_seed(10 * call + rank)
    same = torch.Generator().manual_seed(10 * call + 5)
    x, z = (torch.randn(tokens, HIDDEN, generator=own) for _ in range(2))
    return x, z, torch.randn(tokens, HIDDEN, generator=same), torch.ones(HIDDEN)


def run(
    rank: int,
    world_size: int,
    dynamic_rank: int,
    options: dict[str, Any],
    as_on_gpu: bool = False,
) -> Any:
    """The largest difference from eager over calls of several sizes, the first code, the
    collectives of the first graph in their order after the pass, and the names of the op's
    events in the dispatcher.

    Args:
        rank: This rank.
        world_size: Ranks.
        dynamic_rank: The rank that compiles with dynamic sizes from the start.
        options: Inductor's.
        as_on_gpu: Write the code that is written for a GPU; its sites find no GPU kernel and
            take the op's own way.
    """
    del world_size
    if as_on_gpu:
        inductor.runs_on_gpu = lambda device: True
    orders: list[list[str]] = []

    def recorded(graph: torch.fx.Graph, *args: Any, **keywords: Any) -> Any:
        report = fuse_graph(graph, *args, **keywords)
        names = [str(node.target) for node in graph.nodes]
        orders.append(
            ["site" if "fx_fusion" in n else "all_reduce" for n in names if "all_reduce" in n]
        )
        return report

    fuse_graph = pipeline.fuse_graph
    pipeline.fuse_graph = recorded
    torch._dynamo.reset()
    compile_every_graph_again()
    dynamic = True if rank == dynamic_rank else None
    compiled = torch.compile(
        two_sites_and_a_plain_one, backend="fx_fusion", dynamic=dynamic, options=options
    )
    worst, source = 0.0, ""
    with torch.no_grad():
        for call, tokens in enumerate((4, 4, 1, 7, 9, 4)):
            given = inputs(rank, call, tokens)
            if call == 0:
                results, codes = cast(Any, run_and_get_code)(compiled, *given)
                source = codes[0]
            else:
                results = compiled(*given)
            expected = two_sites_and_a_plain_one(*given)
            for a, b in zip(results, expected, strict=True):
                assert a.stride() == b.stride()
                worst = max(worst, float((a - b).abs().max()))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profile:
            compiled(*given)
    events = {event.key for event in profile.key_averages() if "fx_fusion" in event.key}
    return worst, source, orders[0], sorted(events)


def generated_code() -> str:
    """The code of one site whose hidden state is used, for the group that exists."""

    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        h = residual + all_reduce(x @ x.t() @ x)
        return torch.nn.functional.rms_norm(h, (HIDDEN,), weight, 1e-6) * 2, h.sin()

    compile_every_graph_again()
    compiled = torch.compile(block, backend="fx_fusion")
    given = inputs(0, 0, 4)
    with torch.no_grad():
        _, codes = cast(Any, run_and_get_code)(compiled, given[0], given[2], given[3])
    return str(codes[0])

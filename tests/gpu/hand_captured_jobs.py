"""A compiled model captured with torch.cuda.graph by hand, as serving engines do it."""

from __future__ import annotations

from typing import Any

import compiled_jobs
import torch


def captured_by_hand(
    rank: int, world_size: int, sizes: tuple[int, ...], calls: int
) -> list[str]:
    """One graph for each number of tokens over an input that stays in place; replayed in turn."""
    del world_size
    model = compiled_jobs.Layers(rank)
    workspace = compiled_jobs.workspace_now()
    compiled = torch.compile(
        model, backend="fx_fusion", options={"kernel": "fx_fusion"}, dynamic=False
    )
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, Any]] = {}
    with torch.no_grad():
        for tokens in sizes:
            static = compiled_jobs.hidden_states(tokens, 0)
            with compiled_jobs.unfused(workspace):
                compiled(static)
            compiled(static)
            torch.cuda.synchronize()
            compiled_jobs.meet()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = compiled(static)
            graphs[tokens] = graph, static, outputs
            compiled_jobs.meet()  # no rank replays what another is still capturing

        def replayed(h: torch.Tensor) -> Any:
            graph, static, outputs = graphs[len(h)]
            static.copy_(h)
            graph.replay()
            return outputs

        wrong = compiled_jobs.interleaved(model, replayed, sizes, calls)
    workspace.check()
    if compiled_jobs.is_in_a_pool(workspace):
        wrong.append("the workspace lies in a pool of torch's allocator")
    return wrong

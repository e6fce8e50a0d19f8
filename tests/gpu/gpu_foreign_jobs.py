"""What the ranks of the test of FlashInfer behind the op run; returns what was wrong."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from gpu_support import Differences, Form, arguments_of, expected_of, parts_of
from op_support import call

from fx_fusion.lowering.select import digest_of
from fx_fusion.settings import FusionSettings

BF16, FP16 = torch.bfloat16, torch.float16
PLAN = digest_of(FusionSettings(kernel="flashinfer"))
#: What releases from 0.6.0 on take.
FORMS = (
    Form(BF16, 4096, BF16, BF16, None, {"want_reduced": False, "want_rstd": False}),
    Form(FP16, 8192, FP16, FP16, None, {"want_reduced": False, "want_rstd": False}),
    Form(BF16, 1024, None, BF16, None, {"want_rstd": False}),
)
TOKENS = (1, 3, 8, 32)


def flashinfer_against_reference(rank: int, world_size: int) -> list[str]:
    """Every form and size, called eagerly and replayed from a graph."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fx_fusion.lowering.foreign").addHandler(handler)
    differences = Differences()
    group = dist.group.WORLD
    assert group is not None
    name = str(group.group_name)
    for number, form in enumerate(FORMS):
        for tokens in TOKENS:
            seed = 100 * number + tokens
            parts = parts_of(form, tokens, seed, world_size)
            made = arguments_of(form, parts[rank], seed, world_size, name)
            arguments = made._replace(plan=PLAN)
            expected = expected_of(parts, arguments)
            torch.cuda.synchronize()
            dist.barrier(group)
            results = call(arguments)
            differences.compare(f"{form} {tokens}", results, arguments, expected)
            torch.cuda.synchronize()
            dist.barrier(group)
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = call(arguments)
            dist.barrier(group)
            for _ in range(3):
                graph.replay()
            differences.compare(f"{form} {tokens} graph", replayed, arguments, expected)
            torch.cuda.synchronize()
    return messages + differences.lines()

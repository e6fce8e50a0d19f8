"""The op on real GPUs: two ranks, which share one where there is only one."""

from __future__ import annotations

from functools import partial

import op_support
import pytest
import torch
from op_support import (
    BF16,
    DTYPES,
    FP32,
    all_reduce,
    call,
    describe,
    differences,
    part,
    product,
    shared,
)

from fx_fusion.lowering.reference import eager_lines, rank_order_reference
from fx_fusion.testing import spawn

arguments_for = partial(op_support.arguments_for, plan=op_support.UNFUSED)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
]


def on_gpu(rank: int, world_size: int) -> list[str]:
    failed = []
    cases = product(
        dtype=DTYPES,
        deterministic=(False, True),
        shape=((1, 2880), (3, 63), (0, 64), (2, 3, 64)),
        residual=(None, BF16, FP32),
        offset=(0, 1),
    )
    for case in cases:
        shape, dtype = case["shape"], case["dtype"]
        # Off alignment by one element, on one rank only, where the offset is 1.
        size = torch.Size(shape).numel()
        offset = case["offset"] if rank == 1 else 0
        parts = [part(r, size + 1, dtype=dtype).cuda() for r in range(world_size)]
        parts = [
            p[o : size + o].view(shape) for p, o in zip(parts, (0, case["offset"]), strict=True)
        ]
        assert parts[rank].storage_offset() == offset
        residual = None
        if case["residual"] is not None:
            residual = shared(*shape, dtype=case["residual"]).cuda()
        arguments = arguments_for(
            parts[rank],
            residual=residual,
            weight=shared(shape[-1], dtype=dtype, seed=2).cuda(),
            scale_tensor=torch.tensor(0.22),
            norm_dtype=dtype,
            deterministic=case["deterministic"],
        )
        if case["deterministic"]:
            expected = rank_order_reference(parts, arguments)
        elif size == 0:
            expected = eager_lines(parts[rank].clone(), arguments)
        else:
            expected = eager_lines(all_reduce(parts[rank]), arguments)
        given = call(arguments)
        assert all(result.is_cuda for result in given)
        failed += [f"{describe(case)}: {d}" for d in differences(given, expected)]
    return failed


def test_two_ranks_on_gpus_equal_eager_and_the_rank_order_reference() -> None:
    assert spawn(on_gpu, 2, device="cuda", timeout=180) == [[], []]

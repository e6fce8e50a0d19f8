"""What the kernels benchmark compares: counts, causes, FlashInfer's variants, the checks."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_kernel_job import job

from fx_fusion.bench import kernel_flashinfer as flashinfer
from fx_fusion.bench import kernel_links as links
from fx_fusion.bench.kernel_candidates import FORCED, NAMES, traffic
from fx_fusion.bench.kernel_cells import cells_of
from fx_fusion.bench.kernel_graphs import (
    OPS,
    Captured,
    Inputs,
    difference,
    make_inputs,
    wrong_results,
)
from fx_fusion.bench.kernel_steps import Candidate, add_rms_norm
from fx_fusion.bench.kernel_times import Job
from fx_fusion.testing import spawn

BF16 = torch.bfloat16


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 7, 8, 64])
def test_one_shot_sends_all_to_all_and_two_shot_twice_a_share(
    world_size: int, tokens: int
) -> None:
    row_bytes = 8192
    data = tokens * row_bytes
    one = links.push_one_shot(tokens, row_bytes, world_size)
    assert one == ((world_size - 1) * data, 1)
    # counted the slow way: every row that some rank sends to another, of the busiest rank
    sent = [0] * world_size
    for row in range(tokens):
        owner = row % world_size
        for rank in range(world_size):
            sent[rank] += (world_size - 1) if rank == owner else 1
    two = links.push_two_shot(tokens, row_bytes, world_size)
    assert two == (max(sent) * row_bytes, 2)
    if tokens % world_size == 0:
        assert two.sent * world_size == 2 * (world_size - 1) * data
    assert links.torch_one_shot(tokens, row_bytes, world_size).sent == one.sent
    assert two.microseconds == pytest.approx(two.sent / 450e3)


def test_traffic_is_counted_for_every_candidate_of_one_algorithm() -> None:
    unknown = {name for name in NAMES if traffic(name, 8, 8192, 4) is None}
    assert unknown == {"fx_fusion", "fx_fusion auto", "fx_fusion unfused", "own all_reduce"}


def test_flashinfer_runs_only_where_it_can() -> None:
    def cause(
        one_shot: bool, world: int, tokens: int, hidden: int, shared: bool = False
    ) -> str:
        return flashinfer.cell_cause(one_shot, world, tokens, hidden, 2, shared)

    assert cause(True, 2, 64, 4096) == ""
    assert "3 ranks" in cause(True, 3, 64, 4096)
    assert "16 bytes" in cause(True, 2, 64, 4100)
    assert "more tokens than ranks" in cause(False, 4, 4, 4096)
    assert "far slower" in cause(False, 4, 63, 4096)
    assert cause(False, 4, 64, 4096) == ""
    assert "1 GiB" in cause(True, 8, 8192, 8192)
    assert cause(True, 4, 32, 4096, shared=True) == ""
    assert "hang" in cause(True, 4, 33, 4096, shared=True)


class Module:
    """Stands in for FlashInfer's module; the real one's argument names, keyword by keyword."""

    AllReduceFusionPattern = SimpleNamespace(kARResidualRMSNorm=1)
    QuantizationSFLayout = SimpleNamespace(SWIZZLED_128x4=0)

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.made: tuple[Any, ...] = ()

    def trtllm_allreduce_fusion(
        self,
        allreduce_in: torch.Tensor,
        world_size: int,
        world_rank: int,
        token_num: int,
        hidden_dim: int,
        workspace_ptrs: torch.Tensor,
        launch_with_pdl: bool,
        trigger_completion_at_end: bool,
        fp32_acc: bool,
        pattern_code: int,
        use_oneshot: bool | None,
        allreduce_out: torch.Tensor | None,
        residual_in: torch.Tensor,
        residual_out: torch.Tensor,
        norm_out: torch.Tensor,
        quant_out: None,
        scale_out: None,
        rms_gamma: torch.Tensor,
        rms_eps: float,
        scale_factor: None,
        layout_code: int | None,
    ) -> None:
        self.seen = dict(locals())
        norm, hidden = add_rms_norm(allreduce_in * world_size, residual_in, rms_gamma)
        norm_out.copy_(norm)
        residual_out.copy_(hidden)

    def trtllm_create_ipc_workspace_for_all_reduce_fusion(
        self,
        tp_rank: int,
        tp_size: int,
        max_token_num: int,
        hidden_dim: int,
        use_fp32_lamport: bool = False,
        group: Any = None,
    ) -> tuple[list[int], torch.Tensor]:
        print("addresses")
        self.made = (tp_rank, tp_size, max_token_num, hidden_dim, use_fp32_lamport)
        return [1], torch.zeros(7, dtype=torch.int64)


def test_flashinfer_gets_the_largest_size_and_every_argument(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, group = Module(), SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    made = flashinfer.make_workspace(module, [(8, 4096), (64, 64)], BF16, group)  # type: ignore[arg-type]
    assert module.made == (1, 2, 8, 4096, False)
    assert capsys.readouterr().out == ""
    x, residual, weight = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8)
    norm, hidden = made.step(one_shot=True, programmatic=False)(x, residual, weight)
    assert torch.equal(hidden, torch.full((4, 8), 3.0))
    assert torch.allclose(norm, torch.ones(4, 8))
    assert module.seen["use_oneshot"]
    assert module.seen["fp32_acc"]
    assert (module.seen["token_num"], module.seen["hidden_dim"]) == (4, 8)
    assert (module.seen["world_rank"], module.seen["pattern_code"]) == (1, 1)


def inputs(rank: int) -> Inputs:
    return make_inputs(3, 64, BF16, rank, 2, "cpu")


def test_inputs_differ_by_rank_and_op_and_every_rank_expects_the_same() -> None:
    one, other = inputs(0), inputs(1)
    assert len({tuple(x.flatten().tolist()) for x in [*one.x, *other.x]}) == 2 * OPS
    assert torch.equal(one.residual, other.residual)
    for mine, theirs in ((one.first, other.first), (one.last, other.last)):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    reduced = (one.x[0].float() + other.x[0].float()).to(BF16)
    assert torch.equal(one.first.hidden, reduced + one.residual)


def test_a_wrong_result_is_seen_in_the_first_op_and_in_the_last() -> None:
    given = inputs(0)
    chained = Candidate(lambda x, r, w: (x, r), exact=True)
    apart = replace(chained, chained=False)
    right = Captured(None, given.first[:2], given.last[:2], None)
    assert wrong_results(right, chained, given) == ""
    assert wrong_results(right, apart, given).startswith(f"after {OPS} ops, ")
    right_apart = right._replace(last=given.last_apart[:2])
    assert wrong_results(right_apart, apart, given) == ""
    broken = given.first.norm.clone()
    broken[1, 3] += 1
    wrong = right._replace(first=(broken, given.first.hidden))
    assert "1 of 192 elements of its norm" in wrong_results(wrong, chained, given)
    nan = (given.first.norm, torch.full_like(given.first.hidden, math.nan))
    assert "its residual" in difference(nan, given.first, given.weight, exact=False)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_sum_rounded_at_each_addition_passes_and_a_slightly_wrong_norm_does_not(
    world_size: int, dtype: torch.dtype
) -> None:
    ranks = [make_inputs(4, 1024, dtype, r, world_size, "cpu") for r in range(world_size)]
    given = ranks[0]
    hidden, results = given.residual, []
    for number in range(OPS):
        reduced = ranks[-1].x[number]
        for other in ranks[:-1]:
            reduced = reduced + other.x[number]  # rounds each time, in another order
        norm, hidden = add_rms_norm(reduced, hidden, given.weight)
        results.append((norm, hidden))
    made = Captured(None, results[0], results[-1], None)
    assert wrong_results(made, Candidate(lambda x, r, w: (x, r)), given) == ""
    if dtype != torch.float32 and world_size > 2:
        assert wrong_results(made, Candidate(lambda x, r, w: (x, r), exact=True), given)
    # a sum of squares that misses a 24th of the row, as a part of a warp may be dropped
    scaled = (given.first.norm.float() * (24 / 23) ** 0.5).to(dtype)
    off = (scaled, given.first.hidden)
    exact = difference(off, given.first, given.weight, exact=True)
    assert "its norm" in exact
    percent = (given.first.norm.float() * 1.01).to(dtype)
    assert "its norm" in difference(
        (percent, given.first.hidden), given.first, given.weight, exact=True
    )


def test_squares_added_up_in_another_order_pass_in_fp32_and_a_wrong_root_does_not() -> None:
    given = make_inputs(64, 8192, torch.float32, 0, 2, "cpu")
    hidden = given.first.hidden
    squares = hidden.square().view(64, 256, 32)
    total = torch.zeros(64, 32)
    for part in squares.unbind(1):  # one after the other, 32 sums side by side
        total += part
    for factor in (1.0, 1 + 2e-6):
        root = factor * torch.rsqrt(total.sum(-1, keepdim=True) / 8192 + 1e-6)
        norm = hidden * root * given.weight
        found = difference((norm, hidden), given.first, given.weight, exact=True)
        assert ("its norm" in found) == (factor != 1.0), found


def test_a_candidate_that_one_rank_cannot_capture_is_left_out_on_all() -> None:
    causes = dict.fromkeys(flashinfer.VARIANTS, "it isn't installed")
    names = [name for name in NAMES if name not in FORCED]  # those are of GPUs
    given = Job(
        [(1, 64), (8, 64), (16, 64)], "bfloat16", 7, names, causes | {"raise on rank 1": ""}
    )
    runs = spawn(job, 2, timeout=90, args=(given,))
    assert runs[1] == []
    cells = [cell for measured in runs[0] for cell in cells_of(measured, "bfloat16", 2)]
    found = {(c.candidate, c.tokens): c for c in cells}
    assert found["fx_fusion", 1].median >= 0
    assert found["fx_fusion", 1].cause == ""
    assert math.isnan(found["own all_reduce", 1].median)
    assert found["own all_reduce", 1].cause == "rank 1: ValueError: no"
    assert found["flashinfer two-shot", 8].cause == "it isn't installed"
    assert found["own all_reduce", 8].median >= 0
    assert "NCCL" in found["nccl", 8].cause
    for name in ("fx_fusion", "own all_reduce"):  # where prepare() says that they can't run
        assert "can't run here" in found[name, 16].cause

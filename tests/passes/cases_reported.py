"""Cases made from public bug reports against fusions of this kind, and from models' sources."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case_support import (
    FP32,
    HIDDEN,
    TOKENS,
    Groups,
    Made,
    all_reduce,
    case,
    part,
    rms_norm,
    rms_norm_gemma,
    rms_norm_late_cast,
    shared,
    usual,
    weight,
)
from torch import nn

from fx_fusion.report import Reason


@case("vllm#48324, vllm#48330: an fp32 weight read as bf16", fused=1)
def fp32_weight_with_bf16_stream(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x, g.tp)

    x, residual = part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN)
    return usual(hidden, x, residual, norm=rms_norm_gemma, w=weight(dtype=FP32) - 1)


@case(
    "vllm#41767, vllm#24604, TensorRT-LLM#8374: one spelling fuses, the next doesn't",
    fused=6,
    outputs="n-----h",
)
def six_spellings(g: Groups, rank: int) -> Made:
    eps = 1e-6

    def torch_own(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(h, (HIDDEN,), w, eps)

    def methods(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = h.float()
        return (y * y).mean(-1, keepdim=True).add(eps).rsqrt().mul(y).to(h.dtype) * w

    def divided(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = h.float()
        return w * (y / torch.sqrt(y.square().mean(-1, keepdim=True) + eps)).to(h.dtype)

    def power(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = h.float()
        root = torch.pow(y.pow(2).mean(-1, keepdim=True) + eps, -0.5)
        return (y * root * w.float()).type_as(h)

    norms = (rms_norm, rms_norm_late_cast, torch_own, methods, divided, power)

    def fn(x: torch.Tensor, h: torch.Tensor, w: torch.Tensor, wm: torch.Tensor) -> Any:
        outputs = []
        for norm in norms:
            h = h + all_reduce(x, g.tp)
            outputs.append(norm(h, w))
            x = outputs[-1] @ wm
        return *outputs, h

    wm = part(rank, HIDDEN, HIDDEN, seed=3, scale=0.1)
    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight(), wm)


@case("vllm#48757, TensorRT-LLM#14796: MoE's flat tokens are put back in shape", fused=1)
def reshape_in_between(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x, g.tp).view(-1, 4, HIDDEN)

    return usual(hidden, part(rank, TOKENS, HIDDEN), shared(TOKENS // 4, 4, HIDDEN))


@case("TensorRT-LLM#7545: the operands of the add the other way round", fused=3, outputs="n---")
def operand_order(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, wm: torch.Tensor) -> Any:
        first = residual + all_reduce(x, g.tp)
        norm = rms_norm(first, w)
        second = all_reduce(norm @ wm, g.tp) + first
        norm_2 = rms_norm(second, w)
        third = all_reduce(norm_2 @ wm, g.tp).clone()
        third += second
        return norm, norm_2, rms_norm(third, w), third

    wm = part(rank, HIDDEN, HIDDEN, seed=3, scale=0.1)
    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight(), wm)


@case("vllm#43953: the reduced value has a reader of its own", fused=1, outputs="nhh")
def reduced_value_is_returned(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        y = all_reduce(x, g.tp)
        h = residual + y
        return rms_norm(h, w), h, y

    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight())


@case(
    "sglang#32511, sglang#32963: two groups, and the sum over the wrong one is skipped",
    fused=1,
    reasons=(Reason.CHAINED_ALL_REDUCES,),
    world_size=4,
)
def reduced_over_two_groups(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(all_reduce(x, g.across), g.tp)

    return usual(hidden, part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN))


@case("sglang#27835, torchtitan#4634: TP of one", fused=0, reasons=(Reason.GROUP_OF_ONE,))
def group_of_one(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x, g.alone)

    return usual(hidden, part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN))


@case(
    "vllm#24021, vllm#27894: the residual broadcasts",
    fused=0,
    reasons=(Reason.RESIDUAL_SHAPE, Reason.RESIDUAL_SHAPE),
    outputs="nhnh",
    dynamic=False,  # with symbolic sizes nothing says that they differ
)
def broadcast_residual(g: Groups, rank: int) -> Made:
    def fn(x: Any, row: Any, x_row: Any, residual: Any, w: torch.Tensor) -> Any:
        h, k = row + all_reduce(x, g.tp), residual + all_reduce(x_row, g.tp)
        return rms_norm(h, w), h, rms_norm(k, w), k

    x, x_row = part(rank, TOKENS, HIDDEN), part(rank, 1, HIDDEN)
    return fn, (x, shared(1, HIDDEN), x_row, shared(TOKENS, HIDDEN), weight())


@case("Granite, mlc-llm#941: the block's output is scaled before the add", fused=1)
def scaled_residual(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x, g.tp) * 0.22

    return usual(hidden, part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN))


@case(
    "TensorRT-LLM#5801, vllm#57645: Gemma 2 norms before it adds",
    fused=1,
    outputs="--",
    inductor=False,
)
def norm_on_both_sides(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        h = residual + rms_norm_gemma(all_reduce(x, g.tp), w)
        return rms_norm_gemma(h, v), h

    weights = weight() - 1, weight(seed=1) - 1
    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), *weights)


@case(
    "DeepSeek-V3: routed and shared experts are reduced apart, then added",
    fused=0,
    reasons=(Reason.SUMMED_ALL_REDUCES, Reason.SUMMED_ALL_REDUCES),
)
def two_reduced_values_summed(g: Groups, rank: int) -> Made:
    def hidden(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + (all_reduce(a, g.tp).view(-1, HIDDEN) + all_reduce(b, g.tp))

    a, b = part(rank, TOKENS, HIDDEN), part(rank, TOKENS, HIDDEN, seed=2)
    return usual(hidden, a, b, shared(TOKENS, HIDDEN))


@case("vllm#48324: bf16 partial sums, fp32 residual stream", fused=1)
def mixed_dtypes(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x, g.tp)

    x, residual = part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN, dtype=FP32)
    return usual(hidden, x, residual, w=weight(dtype=FP32))


@case("pytorch#174280: in-place all_reduce of an intermediate", fused=1)
def in_place(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, wm: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = x @ wm
        dist.all_reduce(y, group=g.tp)
        return residual + y

    wm = shared(HIDDEN, HIDDEN, seed=4, scale=0.1)
    return usual(hidden, part(rank, TOKENS, HIDDEN), wm, shared(TOKENS, HIDDEN))


@case("pytorch#167430, pytorch#137259, pytorch#128066: the input is a transposed view", fused=1)
def transposed_input(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x.t(), g.tp)

    return usual(hidden, part(rank, HIDDEN, TOKENS), shared(TOKENS, HIDDEN))


@case("tvm#15856, cutlass#1112: each norm has its own eps", fused=2, outputs="n--")
def two_eps(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, wm: torch.Tensor) -> Any:
        h = residual + all_reduce(x, g.tp)
        first = rms_norm(h, w, 1e-5)
        k = h + all_reduce(first @ wm, g.tp)
        return first, rms_norm(k, w, 1e-6), k

    x = part(rank, TOKENS, HIDDEN, dtype=FP32, scale=1e-3)  # so small that eps matters
    residual = shared(TOKENS, HIDDEN, dtype=FP32, scale=1e-3)
    wm = part(rank, HIDDEN, HIDDEN, dtype=FP32, seed=3, scale=1e-4)
    return fn, (x, residual, weight(dtype=FP32), wm)


@case("plain CPU Inductor reads a result before its wait here", fused=2, outputs="nnh")
def independent_partials(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, z: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        h = residual + all_reduce(x, g.tp)
        first = rms_norm(h, w)
        k = h + all_reduce(z, g.tp)
        return first, rms_norm(k, w), k

    x, z = (part(rank, TOKENS, HIDDEN, dtype=FP32, seed=seed) for seed in (0, 9))
    return fn, (x, z, shared(TOKENS, HIDDEN, dtype=FP32), weight(dtype=FP32))


@case(
    "yalis#36, vllm#43410: a hidden size sharded over ranks",
    fused=0,
    reasons=(Reason.SUM_OF_SQUARES,),
    outputs="-",
)
def sum_of_squares_is_reduced(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (residual + x).float()
        mean = all_reduce(h.pow(2).sum(-1, keepdim=True), g.tp) / (2 * HIDDEN)
        return w * (h * torch.rsqrt(mean + 1e-6)).to(residual.dtype)

    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight())


@case(
    "TensorRT-LLM#6850, sglang#37104: the last norm; nothing reads the sum",
    fused=1,
    outputs="n",
)
def last_norm(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return rms_norm(residual + all_reduce(x, g.tp), w)

    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight())


class _Trained(nn.Module):
    def __init__(self, g: Groups, rank: int) -> None:
        super().__init__()
        self.group = g.tp
        self.a = nn.Parameter(part(rank, HIDDEN, HIDDEN, dtype=FP32, scale=0.1))
        self.b = nn.Parameter(part(rank, HIDDEN, HIDDEN, dtype=FP32, seed=1, scale=0.1))
        self.w1 = nn.Parameter(weight(dtype=FP32))
        self.w2 = nn.Parameter(weight(dtype=FP32, seed=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + all_reduce(x @ self.a, self.group)
        h = h + all_reduce(torch.relu(rms_norm(h, self.w1)) @ self.b, self.group)
        return rms_norm(h, self.w2)


@case(
    "pytorch#148701, TransformerEngine#435: a training step",
    fused=2,
    reasons=(Reason.GRADIENT, Reason.GRADIENT),
    outputs="-",
    train=True,
)
def training(g: Groups, rank: int) -> Made:
    return _Trained(g, rank), (shared(TOKENS, HIDDEN, dtype=FP32),)


@case("flashinfer#1223, EmbeddedLLM/vllm#81: a hidden size no vector divides", fused=1)
def odd_hidden_size(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x, g.tp)

    return usual(hidden, part(rank, TOKENS, 63), shared(TOKENS, 63), w=weight(63))

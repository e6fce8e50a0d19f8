"""Cases: several sites, several groups, in-place writes, odd inputs, whole training steps."""

from __future__ import annotations

from typing import Any, cast

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
    shared,
    usual,
    weight,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from fx_fusion.report import Reason

SUMMED = (Reason.SUMMED_ALL_REDUCES,)


def add(x: torch.Tensor, residual: torch.Tensor, g: Groups) -> torch.Tensor:
    return residual + all_reduce(x, g.tp)


@case("vllm#45917: two disjoint groups of two, both fuse", fused=2, world_size=4, outputs="nnh")
def a_site_for_each_group(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, z: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        h = residual + all_reduce(x, g.tp)
        k = h + all_reduce(z, g.across)
        return rms_norm(h, w), rms_norm(k, w), k

    x, z = part(rank, TOKENS, HIDDEN), part(rank, TOKENS, HIDDEN, seed=2)
    return fn, (x, z, part(rank // 4, TOKENS, HIDDEN), weight())


@case("the embedding's sum is normed and is the first residual", fused=3, outputs="n-")
def model_with_embedding(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, w: torch.Tensor, wm: torch.Tensor) -> Any:
        h = all_reduce(x, g.tp)
        first = n = rms_norm(h, w)
        for _ in range(2):
            h = h + all_reduce(n @ wm, g.tp)
            n = rms_norm(h, w)
        return first, n

    wm = part(rank, HIDDEN, HIDDEN, seed=3, scale=0.1)
    return fn, (part(rank, TOKENS, HIDDEN), weight(), wm)


@case("Gemma scales its embedding", fused=2, outputs="n-", inductor=False)
def scaled_embedding(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, w: torch.Tensor, wm: torch.Tensor) -> Any:
        h = all_reduce(x, g.tp) * HIDDEN**0.5
        n = rms_norm_gemma(h, w)
        return n, rms_norm_gemma(h + all_reduce(n @ wm, g.tp), w)

    wm = part(rank, HIDDEN, HIDDEN, seed=3, scale=0.1)
    return fn, (part(rank, TOKENS, HIDDEN), weight() - 1, wm)


@case("two sums, one norm: one is the other's residual", fused=1, reasons=(Reason.NORM_TAKEN,))
def one_norm_for_two(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, g.tp) + all_reduce(z, g.tp)

    return usual(hidden, part(rank, TOKENS, HIDDEN), part(rank, TOKENS, HIDDEN, seed=2))


@case(
    "GPT-J: parallel blocks; the first sum is in the second's residual", fused=1, reasons=SUMMED
)
def parallel_blocks(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, z: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return (residual + all_reduce(x, g.tp)) + all_reduce(z, g.tp)

    x, z = part(rank, TOKENS, HIDDEN), part(rank, TOKENS, HIDDEN, seed=2)
    return usual(hidden, x, z, shared(TOKENS, HIDDEN))


@case("one sum feeds two norms", fused=1, outputs="n-", inductor=False)
def two_hidden_states(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        y = all_reduce(x, g.tp)
        return rms_norm(residual + y, w), rms_norm(residual * 2 + y, w)

    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight())


@case("pytorch#108811: the partial sum is read again", fused=1, outputs="nhh")
def partial_sum_is_read_again(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        h = add(x, residual, g)
        return rms_norm(h, w), h, torch.relu(x) * 2

    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight())


@case("the partial sum is the residual as well", fused=1)
def residual_is_the_partial_sum(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return x + all_reduce(x, g.tp)

    return usual(hidden, part(rank, TOKENS, HIDDEN))


@case("in-place all_reduce of a graph input", fused=1)
def in_place_on_an_input(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=g.tp)
        return residual + x

    return usual(hidden, part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN))


@case(
    "pytorch#138029: in-place all_reduce of a slice",
    fused=0,
    reasons=(Reason.UNSUPPORTED_STEP,),
)
def in_place_on_a_slice(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y[:4], group=g.tp)
        return residual + y

    return usual(hidden, part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN))


@case("vLLM's layers: the residual is updated in place", fused=1, outputs="n")
def residual_in_place(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        residual += all_reduce(x, g.tp)
        return rms_norm(residual, w)

    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight())


@case("everything in place", fused=1)
def chain_in_place(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=g.tp)
        y += bias
        y *= 0.5
        y += residual
        return y

    x, residual = part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN)
    return usual(hidden, x, residual, shared(HIDDEN, seed=3))


@case("inputs are overwritten once they've been read", fused=1, outputs="nh")
def inputs_overwritten(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        y = all_reduce(x, g.tp)
        x.zero_()
        h = residual + y
        residual.copy_(y)
        return rms_norm(h, w), h

    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight())


@case("a static buffer holds the hidden state", fused=1, outputs="n")
def through_a_buffer(g: Groups, rank: int) -> Made:
    def fn(x: Any, residual: Any, w: Any, buffer: torch.Tensor) -> torch.Tensor:
        buffer.copy_(residual + all_reduce(x, g.tp))
        return rms_norm(buffer, w)

    x, residual = part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN)
    return fn, (x, residual, weight(), torch.zeros_like(residual))


@case("rows with gaps between them, put in another shape", fused=1)
def sliced_input(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x[:, :2], g.tp).view(-1, HIDDEN)

    return usual(hidden, part(rank, 2, 4, HIDDEN), shared(4, HIDDEN))


@case("an expanded input", fused=1)
def expanded_input(g: Groups, rank: int) -> Made:
    def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + all_reduce(x.expand(TOKENS, HIDDEN), g.tp)

    return usual(hidden, part(rank, 1, HIDDEN), shared(TOKENS, HIDDEN))


@case("vLLM's dummy batches: no token at all", fused=1, dynamic=False)
def no_tokens(g: Groups, rank: int) -> Made:
    return usual(lambda x, r: add(x, r, g), part(rank, 0, HIDDEN), shared(0, HIDDEN))


@case("one token without a batch dimension", fused=1)
def one_dimension(g: Groups, rank: int) -> Made:
    return usual(lambda x, r: add(x, r, g), part(rank, HIDDEN), shared(HIDDEN))


@case("a hidden size of one", fused=1, dynamic=False)
def hidden_size_of_one(g: Groups, rank: int) -> Made:
    x, residual = part(rank, TOKENS, 1), shared(TOKENS, 1)
    return usual(lambda x, r: add(x, r, g), x, residual, w=weight(1))


@case("gpt-oss: 2880 elements", fused=1)
def hidden_size_of_2880(g: Groups, rank: int) -> Made:
    x, residual = part(rank, 3, 2880), shared(3, 2880)
    return usual(lambda x, r: add(x, r, g), x, residual, w=weight(2880))


@case(
    "loss and token counts are reduced beside the model",
    fused=1,
    reasons=(Reason.LEAVES_GRAPH, Reason.LEAVES_GRAPH),
    outputs="n--",
)
def other_all_reduces(g: Groups, rank: int) -> Made:
    def fn(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        n = rms_norm(add(x, residual, g), w)
        loss = all_reduce(n.float().pow(2).mean(), g.tp)
        return n, loss, all_reduce((residual > 0).sum(0), g.tp)

    return fn, (part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN), weight())


@case("bf16 activations, fp32 weights and stream under autocast", fused=1, outputs="--")
def autocast(g: Groups, rank: int) -> Made:
    def fn(x: Any, wm: Any, residual: Any, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = residual + all_reduce(x @ wm, g.tp)
            return rms_norm(h, w), h

    x, residual = part(rank, TOKENS, HIDDEN, dtype=FP32), shared(TOKENS, HIDDEN, dtype=FP32)
    wm = shared(HIDDEN, HIDDEN, dtype=FP32, seed=4, scale=0.1)
    return fn, (x, wm, residual, weight(dtype=FP32))


class _Layers(nn.Module):
    """Layers with Megatron's pair of functions around each block."""

    def __init__(self, g: Groups, rank: int, recompute: bool) -> None:
        super().__init__()
        self.group, self.recompute = g.tp, recompute
        parts = [part(rank, HIDDEN, HIDDEN, dtype=FP32, seed=i, scale=0.1) for i in range(2)]
        self.matrices = nn.ParameterList(parts)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def layer(self, n: torch.Tensor, h: torch.Tensor, index: int) -> Any:
        copy_in, reduce_out = cast(Any, _CopyIn).apply, cast(Any, _ReduceOut).apply
        h = h + reduce_out(F.silu(copy_in(n, self.group) @ self.matrices[index]), self.group)
        return self.norm(h), h

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        n = h
        for index in range(len(self.matrices)):
            if self.recompute:
                n, h = checkpoint(self.layer, n, h, index, use_reentrant=False)
            else:
                n, h = self.layer(n, h, index)
        return n


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduce(gradient, ctx.group), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


@case(
    "Megatron's conjugate functions",
    fused=2,
    reasons=(Reason.GRADIENT,) * 2,
    outputs="-",
    train=True,
)
def megatron_training(g: Groups, rank: int) -> Made:
    x = shared(TOKENS, HIDDEN, dtype=FP32).requires_grad_()
    return _Layers(g, rank, recompute=False), (x,)


@case(
    "activation checkpointing: the backward graph computes a site again",
    fused=3,
    reasons=(Reason.GRADIENT,) * 2,
    outputs="-",
    train=True,
)
def checkpointed_training(g: Groups, rank: int) -> Made:
    x = shared(TOKENS, HIDDEN, dtype=FP32).requires_grad_()
    return _Layers(g, rank, recompute=True), (x,)

"""Cases: the spellings of RMSNorm, those that fuse and those that only look like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case_support import (
    BF16,
    FP16,
    FP32,
    HIDDEN,
    TOKENS,
    Groups,
    Made,
    all_reduce,
    case,
    part,
    shared,
    usual,
    weight,
)

from fx_fusion.report import Reason

EPS = 1e-6
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def norm_case(
    report: str,
    *reasons: Reason,
    fused: int | None = None,
    dtype: torch.dtype = BF16,
    **facts: Any,
) -> Callable[[Norm], Norm]:
    """Register a norm of `residual + all_reduce(x)` as a case."""

    def decorate(norm: Norm) -> Norm:
        def make(g: Groups, rank: int) -> Made:
            def hidden(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
                return residual + all_reduce(x, g.tp)

            x = part(rank, TOKENS, HIDDEN, dtype=dtype)
            residual = shared(TOKENS, HIDDEN, dtype=dtype)
            return usual(hidden, x, residual, norm=norm, w=weight(dtype=dtype))

        make.__name__ = f"norm_{norm.__name__}"
        count = 1 - len(reasons) if fused is None else fused
        case(report, fused=count, reasons=reasons, inductor=False, **facts)(make)
        return norm

    return decorate


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.pow(2).mean(-1, keepdim=True)


def scaled(
    h: torch.Tensor, w: torch.Tensor, root: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Llama's norm with the reciprocal root spelt by `root`."""
    y = h.float()
    return w * (y * root(mean_square(y))).to(h.dtype)


@norm_case("Python's division is a reciprocal and a multiplication by one")
def one_over_root(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: 1.0 / torch.sqrt(v + EPS))


@norm_case("cutlass#1112: sqrt and reciprocal")
def reciprocal_of_root(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: (v + EPS).sqrt().reciprocal())


@norm_case("xLSTM, JAX ports: a power of minus one half")
def negative_power(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: (v + EPS) ** -0.5)


@norm_case("eps stands first")
def eps_first(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: torch.rsqrt(EPS + v))


@norm_case("no eps at all")
def no_eps(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, torch.rsqrt)


@norm_case("a mean as sum over the hidden size")
def sum_over_size(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    mean = (y * y).sum(-1, keepdim=True) / HIDDEN
    return w * (y * torch.rsqrt(mean + EPS)).to(h.dtype)


@norm_case("a mean without keepdim, its dimension put back at once")
def mean_then_unsqueeze(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    mean = y.pow(2).mean(-1).unsqueeze(-1)
    return w * (y * torch.rsqrt(mean + EPS)).to(h.dtype)


@norm_case("a mean without keepdim, its dimension put back behind the root")
def root_then_unsqueeze(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    root = torch.rsqrt(y.pow(2).mean(-1) + EPS)
    return w * (y * root[..., None]).to(h.dtype)


@norm_case("a division by a root without keepdim")
def divided_by_viewed_root(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    root = torch.sqrt((y * y).sum(-1) / HIDDEN + EPS)
    return w * (y / root.unsqueeze(-1)).to(h.dtype)


@norm_case("pytorch#159317: the default eps is fp32's, whatever the dtype")
def default_eps(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h, (HIDDEN,), w)


@norm_case("nanochat: a norm without a weight")
def no_weight(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h, (HIDDEN,), None, EPS)


@norm_case("executorch#22849: T5 upcasts for the variance only")
def upcast_for_variance_only(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (h * torch.rsqrt(mean_square(h.float()) + EPS)).to(w.dtype)


@norm_case("Gemma with its 1 + w taken in bf16")
def gemma_in_bf16(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    return (y * torch.rsqrt(mean_square(y) + EPS)).to(h.dtype) * (1 + w)


@norm_case("a norm that stays in fp32")
def fp32_result(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    return w * (y * torch.rsqrt(mean_square(y) + EPS))


@norm_case("a bias behind the weight")
def bias_behind_it(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: torch.rsqrt(v + EPS)) + w


@norm_case("a weight of shape [1, hidden] is multiplied outside")
def row_weight(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    return w.view(1, -1) * (y * torch.rsqrt(mean_square(y) + EPS)).to(h.dtype)


@norm_case("fp16 models", dtype=FP16)
def in_fp16(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: torch.rsqrt(v + EPS))


@norm_case("vllm#41767: quantised at once; the op gives no fp8", outputs="-h")
def to_fp8(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    return (w.float() * (y * torch.rsqrt(mean_square(y) + EPS))).to(torch.float8_e4m3fn)


@norm_case("the op gives no fp64 either")
def to_fp64(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    return (y * torch.rsqrt(mean_square(y) + EPS)).double() * w


@norm_case("PaLM, lucidrains: divided by the length", Reason.NO_NORM)
def normalised_by_length(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    unit: torch.Tensor = F.normalize(h.float(), dim=-1)
    return unit.to(h.dtype) * w * 8.0  # the root of the hidden size


@norm_case("eps outside the root", Reason.NO_NORM)
def eps_outside(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: 1.0 / (torch.sqrt(v) + EPS))


@norm_case("eps as a lower bound", Reason.NO_NORM)
def clamped(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: torch.rsqrt(v.clamp(min=EPS)))


@norm_case("vllm#42453, InternViT: the mean over a part of the hidden size", Reason.NO_NORM)
def partial_variance(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    mean = y[..., : HIDDEN // 2].pow(2).mean(-1, keepdim=True)
    return w * (y * torch.rsqrt(mean + EPS)).to(h.dtype)


@norm_case("the variance of another value", Reason.NO_NORM)
def other_numerator(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    return w * ((y + 1) * torch.rsqrt(mean_square(y) + EPS)).to(h.dtype)


@norm_case("a real variance: the mean is subtracted in it", Reason.LAYER_NORM)
def variance(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    root = torch.rsqrt(y.var(-1, keepdim=True, unbiased=False) + EPS)
    return w * (y * root).to(h.dtype)


@norm_case("StarCoder2, Nemotron, Cohere", Reason.LAYER_NORM, outputs="--")
def layer_norm(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(h, (HIDDEN,), w)


@norm_case("squares summed in bf16", Reason.NORM_NOT_UPCAST)
def not_upcast(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (h * torch.rsqrt(mean_square(h) + EPS))


@norm_case("Qwen3's norm of queries: over a head, not the hidden size", Reason.NORM_DIMS)
def per_head(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h.view(-1, 4, 16), w[:16], lambda v: torch.rsqrt(v + EPS))


@norm_case("as many tokens as hidden elements, normed over the tokens", Reason.NORM_DIMS)
def over_tokens(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(0, keepdim=True) + EPS)).to(h.dtype)


@norm_case("GPT-NeoX, Llama 4: two norms of one hidden state", outputs="-h")
def two_weights(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h, (HIDDEN,), w, 1e-5) * F.rms_norm(h, (HIDDEN,), w + 1, 1e-6)


@norm_case("vllm#42864: a GEMM and a quantisation read the norm")
def two_readers(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    n = scaled(h, w, lambda v: torch.rsqrt(v + EPS))
    return torch.where(n.abs() > 1, n, n * 2)


@norm_case("fp32 all through: the norm reads the sum itself", dtype=FP32)
def in_fp32(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: torch.rsqrt(v + EPS))


@norm_case("fp64 models", Reason.DTYPE, dtype=torch.float64)
def in_fp64(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return scaled(h, w, lambda v: torch.rsqrt(v + EPS))

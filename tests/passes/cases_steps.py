"""Cases: what stands between the all_reduce and the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from case_support import (
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
)

from fx_fusion.report import Reason

#: Gives the hidden state from the reduced value, the residual and a bias.
Steps = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def steps_case(
    report: str, *reasons: Reason, upcast_x: bool = False, **facts: Any
) -> Callable[[Steps], Steps]:
    """Register a hidden state as a case."""

    def decorate(steps: Steps) -> Steps:
        def make(g: Groups, rank: int) -> Made:
            def hidden(x: Any, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
                x = x.float() if upcast_x else x
                return steps(all_reduce(x, g.tp), residual, bias)

            x, residual = part(rank, TOKENS, HIDDEN), shared(TOKENS, HIDDEN)
            return usual(hidden, x, residual, shared(HIDDEN, seed=3))

        make.__name__ = f"steps_{steps.__name__}"
        fused = 0 if reasons else 1
        case(report, fused=fused, reasons=reasons, **{"inductor": False, **facts})(make)
        return steps

    return decorate


@steps_case("text-generation-inference#1036, slapo#10: a bias, once, after the sum")
def bias(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + (y + b)


@steps_case("bias in fp32 promotes the stream")
def bias_in_fp32(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + (b.float() + y)


@steps_case("bias and scale")
def bias_and_scale(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + (y + b) * 0.5


@steps_case("the residual takes the bias first")
def bias_on_residual(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return y + (residual + b)


@steps_case("a bias behind the residual: another rounding", Reason.UNSUPPORTED_STEP)
def late_bias(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (residual + y) + b


@steps_case("LoRA: an adapter's output is added unreduced", Reason.UNSUPPORTED_STEP)
def lora(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + (y + residual * 0.1)


@steps_case("half: exactly representable")
def divided_by_two(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y / 2


@steps_case("a third is not", Reason.UNSUPPORTED_STEP)
def divided_by_three(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y / 3


@steps_case("Hunyuan, mixing both sides")
def both_scaled(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual * 0.5 + y * -1.5


@steps_case("a learnt scalar gate")
def scalar_tensor(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y * b[0]


@steps_case("the gate is rounded to the stream's dtype first")
def rounded_scalar(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y * (b[0].float() / 3).to(y.dtype)


@steps_case("alpha of torch.add", Reason.UNSUPPORTED_STEP, outputs="--")
def alpha(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(residual, y, alpha=0.22)


@steps_case("a difference", Reason.UNSUPPORTED_STEP)
def subtracted(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual - y


@steps_case("CaiT's LayerScale: one factor a channel", Reason.UNSUPPORTED_STEP)
def layer_scale(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y * b


@steps_case("shared-expert gate: one factor a token", Reason.UNSUPPORTED_STEP)
def token_gate(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + torch.sigmoid(residual.float().mean(-1, keepdim=True)).to(y.dtype) * y


@steps_case("Mixture of depths: the value gates itself", Reason.RESIDUAL_DEPENDS)
def residual_from_itself(
    y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return y + torch.relu(y)


@steps_case("the value twice", Reason.UNSUPPORTED_STEP)
def doubled(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return y + y


@steps_case("vllm#41972: no residual", outputs="nh")
def no_residual(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return y


@steps_case("no residual, but a bias")
def no_residual_but_bias(
    y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return y + b


@steps_case("vllm#24604: added in fp32")
def added_in_fp32(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return y.float() + residual.float()


@steps_case("Megatron: reduced in fp32, then rounded", upcast_x=True)
def reduced_in_fp32(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y.to(residual.dtype)


@steps_case("reduced in fp32 and never rounded", upcast_x=True)
def fp32_stream(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y


@steps_case(
    "TensorRT-LLM#14781, Nemotron-H: rounded between add and norm", Reason.UNSUPPORTED_STEP
)
def cast_behind_residual(
    y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return (residual.float() + y).to(y.dtype)


@steps_case("fp16 residual, bf16 block: fp32")
def fp16_residual(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual.to(FP16) + y


@steps_case("no-op casts and copies")
def no_ops(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y.to(FP32).to(y.dtype).contiguous().clone().detach()


@steps_case("vllm#48757: 2-D to 4-D")
def four_dimensions(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual.view(-1, 2, 2, HIDDEN) + y.view(-1, 2, 2, HIDDEN)


@steps_case("pytorch#118802: a view right behind the wait")
def flattened(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual + y.view(-1, 4, HIDDEN).flatten(0, 1)


@steps_case("one more dimension")
def unsqueezed(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual[None] + y[None] * 2


@steps_case("Megatron's sequence-first layout", Reason.UNSUPPORTED_STEP)
def transposed(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual.view(4, -1, HIDDEN) + y.view(-1, 4, HIDDEN).transpose(0, 1)


@steps_case("only the last token is decoded", Reason.UNSUPPORTED_STEP)
def last_token(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual[-1:] + y[-1:]


@steps_case("chunked prefill: the sum is normed in parts", Reason.UNSUPPORTED_STEP)
def split(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (residual + y).chunk(2)[0]


@steps_case("Llama 4: a sum over the experts", Reason.UNSUPPORTED_STEP)
def sum_over_experts(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return residual[::4] + y.view(-1, 4, HIDDEN).sum(1)


@steps_case("TensorRT-LLM#14810: the residual has another row stride")
def strided_residual(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([residual, residual], 1)[:, :HIDDEN] + y


@steps_case("LightLLM#1467: the residual's last dimension isn't dense", inductor=True)
def column_major_residual(
    y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return residual.t().contiguous().t() + y


@steps_case("an expanded residual has the right shape")
def expanded_residual(y: torch.Tensor, residual: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return b.expand_as(residual) + y

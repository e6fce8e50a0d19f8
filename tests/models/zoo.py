"""The model zoo: transformers' architectures, and what of each one must be fused.

Every row was worked out by hand from the model's own code (`transformers/models/*/modeling_*.py`)
and its tensor-parallel plan (`base_model_tp_plan` in `configuration_*.py`); the comment beside a
row is the derivation. Rules that hold for all rows:

* The model's input embedding is sharded over the vocabulary, so the partial lookups are summed:
  one all_reduce ("embedding"). Only a plan that is given by hand leaves it whole.
* A projection or an expert block whose plan says "rowwise", "rowwise_split_input" or
  "moe_tp_experts" ends in one all_reduce. "colwise_gather_output" and the output head gather.
* `h + all_reduce(x)` read by an RMSNorm is a fused site. So is an RMSNorm that reads the reduced
  value itself, as the first layer's does with the embedding. A view, a cast, a bias and a scalar
  scale may stand before the residual.
* A pre-norm layer is `h = h + attention(norm(h)); h = h + mlp(norm(h))`: its attention's sum goes
  into the second norm and its MLP's into the next layer's first norm, or into the final norm.

All models have two decoder layers, so a dense pre-norm model has 1 + 2 * 2 = 5 sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fx_fusion.report import Reason


@dataclass(frozen=True)
class Architecture:
    """One model and its expected outcome in an inference graph.

    Attributes:
        name: What tests call it.
        config: The name of its configuration class in transformers.
        sites: How many all_reduces its graph has.
        fused: How many of them are fused.
        unfused: Why each of the others is not, by the path of the module that calls it.
        steps: What stands between the sums and the norms of its fused sites, taken together.
        options: What its configuration is given beside `COMMON_OPTIONS`.
        tp_plan: The tensor-parallel plan, "auto" for the model's own.
        auto_class: The class of transformers that makes the model from the configuration.
    """

    name: str
    config: str
    sites: int
    fused: int
    unfused: Mapping[str, Reason] = field(default_factory=dict)
    steps: tuple[str, ...] = ("residual",)
    options: Mapping[str, Any] = field(default_factory=dict)
    tp_plan: str | dict[str, str] = "auto"
    auto_class: str = "AutoModelForCausalLM"

    @property
    def has_experts(self) -> bool:
        """True if it chooses experts for each token."""
        return any("experts" in option for option in self.options)


#: Small, and everything divides by two ranks.
COMMON_OPTIONS: Final[Mapping[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: Layer 0 is dense, layer 1 has experts and one shared expert.
_DENSE_THEN_EXPERTS: Final = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
#: DeepSeek's latent attention.
_LATENT_ATTENTION: Final = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
_GRANITE_SCALES: Final = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
    "logits_scaling": 8.0,
}


def _all(reason: Reason, *modules: str) -> dict[str, Reason]:
    return dict.fromkeys(modules, reason)


def _layer_norms(
    name: str,
    config: str,
    *,
    embedding: str = "model.embed_tokens",
    layers: str = "model.layers",
    attention: str = "self_attn.o_proj",
    mlp: str = "mlp.down_proj",
) -> Architecture:
    """A dense model in which each of the five sums leads to a LayerNorm."""
    modules = [f"{layers}.{layer}.{module}" for layer in (0, 1) for module in (attention, mlp)]
    unfused = _all(Reason.LAYER_NORM, embedding, *modules)
    return Architecture(name, config, sites=5, fused=0, unfused=unfused, steps=())


_ROUTED_AND_SHARED: Final = _all(
    Reason.SUMMED_ALL_REDUCES,
    "model.layers.1.mlp.experts",
    "model.layers.1.mlp.shared_experts.down_proj",
)

ZOO: Final[tuple[Architecture, ...]] = (
    # Dense pre-norm models: embedding -> norm; attention + h -> norm; MLP + h -> norm. All fuse.
    Architecture("llama", "LlamaConfig", sites=5, fused=5),
    # The biases of o_proj and down_proj are added after their all_reduce: bias, then residual.
    Architecture(
        "llama_bias",
        "LlamaConfig",
        sites=5,
        fused=5,
        steps=("bias", "residual"),
        options={"attention_bias": True, "mlp_bias": True},
    ),
    Architecture("mistral", "MistralConfig", sites=5, fused=5),
    # Bias on q, k and v alone, which are colwise: nothing after an all_reduce.
    Architecture("qwen2", "Qwen2Config", sites=5, fused=5),
    # Norms of q and k run over head_dim of local heads: no all_reduce leads to them.
    Architecture("qwen3", "Qwen3Config", sites=5, fused=5),
    # Packed q/k/v and gate/up are gathered; o_proj and down_proj split their input and reduce.
    # Dropout of the residual is off in eval.
    Architecture("phi3", "Phi3Config", sites=5, fused=5),
    Architecture("smollm3", "SmolLM3Config", sites=5, fused=5),
    Architecture("ernie4_5", "Ernie4_5Config", sites=5, fused=5),
    # Bias on q, k and v alone (attention_out_bias and mlp_bias are off by default).
    Architecture("seed_oss", "SeedOssConfig", sites=5, fused=5),
    # Weight multiplied in fp32, eps 1e-8.
    Architecture("helium", "HeliumConfig", sites=5, fused=5),
    # MLP without a gate: up_proj, relu squared, down_proj.
    Architecture("arcee", "ArceeConfig", sites=5, fused=5),
    # xIELU, a learned activation between up_proj and down_proj, works on the local shard.
    Architecture("apertus", "ApertusConfig", sites=5, fused=5),
    # gate_up_proj is gathered, down_proj splits its input and reduces.
    Architecture("glm", "GlmConfig", sites=5, fused=5),
    # Norm without a weight. A norm of its own follows the embedding, and its output is both the
    # first layer's residual and the input of that layer's first norm: still one norm a sum.
    Architecture("nanochat", "NanoChatConfig", sites=5, fused=5),
    # The embedding's sum is multiplied by a scalar (sqrt(hidden_size), a 0-d tensor): scale.
    # Norm weight (1 + w).
    Architecture("gemma", "GemmaConfig", sites=5, fused=5, steps=("scale", "residual")),
    # The embedding's sum is scaled by 12, each block's by 0.22 before the residual: scale.
    Architecture(
        "granite",
        "GraniteConfig",
        sites=5,
        fused=5,
        steps=("scale", "residual"),
        options=_GRANITE_SCALES,
    ),
    # Both before and after: h + norm(attention(norm(h))). The sums of attention and MLP go
    # straight into a norm, without residual; so does the embedding's, scaled in Gemma's.
    Architecture(
        "gemma2",
        "Gemma2Config",
        sites=5,
        fused=5,
        steps=("scale",),
        options={"query_pre_attn_scalar": 16},
    ),
    Architecture(
        "gemma3",
        "Gemma3TextConfig",
        sites=5,
        fused=5,
        steps=("scale",),
        options={"query_pre_attn_scalar": 16},
    ),
    Architecture("glm4", "Glm4Config", sites=5, fused=5, steps=()),
    # After alone: h + norm(attention(h)). The four sums of attention and MLP go straight into a
    # norm. The embedding's goes into projections and into the residual stream, which is
    # normalised only once, after the last layer and two adds a layer: no norm of its own.
    Architecture(
        "olmo2",
        "Olmo2Config",
        sites=5,
        fused=4,
        steps=(),
        unfused=_all(Reason.NO_NORM, "model.embed_tokens"),
    ),
    Architecture(
        "exaone4",
        "Exaone4Config",
        sites=5,
        fused=4,
        steps=(),
        unfused=_all(Reason.NO_NORM, "model.embed_tokens"),
    ),
    # Experts in both layers, one all_reduce each on [tokens, hidden], then a view: all fuse.
    Architecture(
        "qwen3_moe",
        "Qwen3MoeConfig",
        sites=5,
        fused=5,
        steps=("view", "residual"),
        options=_EXPERTS,
    ),
    Architecture(
        "mixtral",
        "MixtralConfig",
        sites=5,
        fused=5,
        steps=("view", "residual"),
        options=_LOCAL_EXPERTS,
    ),
    # q, k and v are gathered and q and k normalised whole; o_proj splits its input.
    Architecture(
        "minimax_m2",
        "MiniMaxM2Config",
        sites=5,
        fused=5,
        steps=("view", "residual"),
        options=_LOCAL_EXPERTS,
    ),
    # Only experts are sharded: embedding and one all_reduce a layer; view, then scale by 0.22.
    Architecture(
        "granitemoe",
        "GraniteMoeConfig",
        sites=3,
        fused=3,
        steps=("view", "scale", "residual"),
        options={**_LOCAL_EXPERTS, **_GRANITE_SCALES},
    ),
    # Only experts are sharded: the embedding (scaled) and layer 1's. The sum of the routed experts
    # is added to the shared expert's output, whole on every rank, and normalised: that output
    # stands where a residual does.
    Architecture(
        "afmoe",
        "AfmoeConfig",
        sites=2,
        fused=2,
        steps=("view", "scale", "residual"),
        options={
            **_EXPERTS,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "mup_enabled": True,
        },
    ),
    # The plan leaves the shared expert whole. h + view(all_reduce(experts) + shared): two tensors
    # are added before the norm, and the op has room for one. Embedding and attention fuse.
    Architecture(
        "qwen2_moe",
        "Qwen2MoeConfig",
        sites=5,
        fused=3,
        unfused=_all(
            Reason.UNSUPPORTED_STEP, "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"
        ),
        options={**_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    # The plan shards the embedding alone; its sum goes into the first norm and the residual.
    Architecture("gpt_oss", "GptOssConfig", sites=1, fused=1, steps=(), options=_LOCAL_EXPERTS),
    # Attention is not sharded. Embedding; layer 0's MLP; in layer 1 the routed and the shared
    # experts' sums are added to each other before the residual.
    Architecture(
        "deepseek_v3",
        "DeepseekV3Config",
        sites=4,
        fused=2,
        unfused=_ROUTED_AND_SHARED,
        options={**_DENSE_THEN_EXPERTS, **_LATENT_ATTENTION},
    ),
    # As DeepSeek-V3, and attention is sharded: two more sites, which fuse.
    Architecture(
        "deepseek_v2",
        "DeepseekV2Config",
        sites=6,
        fused=4,
        unfused=_ROUTED_AND_SHARED,
        options={**_DENSE_THEN_EXPERTS, **_LATENT_ATTENTION},
    ),
    Architecture(
        "glm4_moe",
        "Glm4MoeConfig",
        sites=6,
        fused=4,
        unfused=_ROUTED_AND_SHARED,
        options=_DENSE_THEN_EXPERTS,
    ),
    # Layer 0 is dense. In layer 1 every expert sees every token, and the reduced
    # [experts * tokens, hidden] is summed over the experts (no step of ours), added to the shared
    # expert's reduced value, and only then to the residual: two adds for that one.
    Architecture(
        "llama4",
        "Llama4TextConfig",
        sites=6,
        fused=4,
        unfused=_all(
            Reason.UNSUPPORTED_STEP,
            "model.layers.1.feed_forward.experts",
            "model.layers.1.feed_forward.shared_expert.down_proj",
        ),
        options={
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
        },
    ),
    # No plan of its own: the MLPs of two encoder and two decoder blocks are sharded here. Each
    # sum and the residual go into the next block's norm or the stack's final one. The norm
    # multiplies the tensor before its upcast; wo stays in fp32 in a bf16 model.
    Architecture(
        "t5",
        "T5Config",
        sites=4,
        fused=4,
        options={
            "d_model": 64,
            "d_ff": 96,
            "d_kv": 16,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        tp_plan={
            f"{stack}.block.*.layer.*.DenseReluDense.{projection}": style
            for stack in ("encoder", "decoder")
            for projection, style in (("wi", "colwise"), ("wo", "rowwise"))
        },
        auto_class="AutoModelForSeq2SeqLM",
    ),
    # LayerNorm, written out (mean, x - mean, mean square) or as layer_norm: nothing may fuse. In
    # Cohere's parallel blocks (h + attention) + mlp and Phi's and GPT-NeoX's (attention + mlp) + h
    # it is the LayerNorm behind the adds that decides: no option would make them fuse.
    _layer_norms("cohere", "CohereConfig"),
    _layer_norms("cohere2", "Cohere2Config"),
    _layer_norms("starcoder2", "Starcoder2Config", mlp="mlp.c_proj"),
    _layer_norms("nemotron", "NemotronConfig"),
    _layer_norms("olmo", "OlmoConfig"),
    _layer_norms("phi", "PhiConfig", attention="self_attn.dense", mlp="mlp.fc2"),
    _layer_norms(
        "gpt_neox",
        "GPTNeoXConfig",
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        attention="attention.dense",
        mlp="mlp.dense_4h_to_h",
    ),
)

BY_NAME: Final[Mapping[str, Architecture]] = {row.name: row for row in ZOO}

"""Decoder layers in the shapes of known models, tensor-parallel, with random weights.

Plain PyTorch and functional collectives: pre-norm layers of grouped-query attention over a
key-value cache and a gated MLP, each followed by an all_reduce, the residual and the next
RMSNorm. There is no embedding and no LM head, which have no site of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

_EPS: Final = 1e-6
_ROPE_BASE: Final = 10000.0
#: Elements of the KV cache of a layer are small, as those of a trained model's values are.
_CACHE_SCALE: Final = 0.5


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer.

    Attributes:
        hidden_size: Elements of a row.
        heads: Query heads.
        kv_heads: Key-value heads.
        head_size: Elements of a head.
        mlp_size: Elements between the MLP's two projections.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int


#: The models' published configurations, as far as one dense layer can stand for them:
#: gpt-oss-20b's MLP has the size of one expert in bfloat16, which moves as many bytes as the
#: four MXFP4 experts (4.25 bits an element) that a token is routed to. DeepSeek-V3's has the
#: size of its dense layers, 9 experts of 2048; grouped-query attention stands for its latent one.
SHAPES: Final = {
    "gpt-oss-20b": Shape(2880, 64, 8, 64, 2880),
    "llama-3-8b": Shape(4096, 32, 8, 128, 14336),
    "qwen3-32b": Shape(5120, 64, 8, 128, 25600),
    "deepseek-v3": Shape(7168, 128, 8, 128, 18432),
    "tiny": Shape(64, 16, 8, 16, 128),
}


class RMSNorm(nn.Module):
    """The norm as Llama's code spells it: `weight * cast(h * rsqrt(mean(h^2) + eps))`."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Take the weight, [hidden size]."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] in and out; computed in fp32."""
        hidden32 = hidden.float()
        normed = hidden32 * torch.rsqrt(hidden32.pow(2).mean(-1, keepdim=True) + _EPS)
        return self.weight * normed.to(hidden.dtype)


class Weights:
    """Random tensors: one stream of numbers that all ranks share, one of this rank's own."""

    def __init__(self, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Seed both streams."""
        self.dtype, self.device = dtype, device
        self._own = torch.Generator(device).manual_seed(1 + rank)
        self._shared = torch.Generator(device).manual_seed(0)

    def shared(self, *size: int) -> torch.Tensor:
        """Normal values, the same on every rank."""
        return self._random(self._shared, size)

    def shard(self, rows: int, columns: int, inputs: int) -> nn.Parameter:
        """A rank's part of a projection that adds up `inputs` products, scaled to keep size."""
        value = self._random(self._own, (rows, columns)).mul_(inputs**-0.5)
        return nn.Parameter(value, requires_grad=False)

    def cache(self, *size: int) -> torch.Tensor:
        """A rank's part of a key or value cache."""
        return self._random(self._own, size).mul_(_CACHE_SCALE)

    def _random(self, stream: torch.Generator, size: tuple[int, ...]) -> torch.Tensor:
        value = torch.empty(size, dtype=self.dtype, device=self.device)
        return value.normal_(generator=stream)


class Layer(nn.Module):
    """One decoder layer of one rank, for one new token of each of `tokens` sequences."""

    keys: torch.Tensor
    values: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        shape: Shape,
        tokens: int,
        cache_length: int,
        weights: Weights,
        group: dist.ProcessGroup,
    ) -> None:
        """Make this rank's part of the weights and of the cache."""
        super().__init__()
        self.shape, self.group = shape, group
        size = group.size()
        hidden_size, head_size = shape.hidden_size, shape.head_size
        self.heads, self.kv_heads = shape.heads // size, shape.kv_heads // size
        mlp_size = shape.mlp_size // size
        self.attention_norm = RMSNorm(1 + 0.1 * weights.shared(hidden_size))
        self.mlp_norm = RMSNorm(1 + 0.1 * weights.shared(hidden_size))
        rows = (self.heads + 2 * self.kv_heads) * head_size
        self.qkv = weights.shard(rows, hidden_size, hidden_size)
        self.out = weights.shard(hidden_size, self.heads * head_size, shape.heads * head_size)
        self.gate_up = weights.shard(2 * mlp_size, hidden_size, hidden_size)
        self.down = weights.shard(hidden_size, mlp_size, shape.mlp_size)
        cache = (tokens, self.kv_heads, cache_length, head_size)
        self.register_buffer("keys", weights.cache(*cache))
        self.register_buffer("values", weights.cache(*cache))
        angles = (cache_length - 1) / _ROPE_BASE ** (torch.arange(0, head_size, 2) / head_size)
        angles = torch.cat((angles, angles)).to(weights.device)
        self.register_buffer("cos", angles.cos().to(weights.dtype))
        self.register_buffer("sin", angles.sin().to(weights.dtype))

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        import torch.distributed._functional_collectives as functional

        summed: torch.Tensor = cast(Any, functional).all_reduce(partial, "sum", self.group)
        return summed

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding at the cache's last place."""
        first, second = heads.chunk(2, -1)
        return heads * self.cos + torch.cat((-second, first), -1) * self.sin

    def attention(self, normed: torch.Tensor) -> torch.Tensor:
        """This rank's part of the attention's output; the new token becomes the cache's last."""
        tokens, head_size = normed.shape[0], self.shape.head_size
        qkv = linear(normed, self.qkv).view(tokens, -1, head_size)
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        query, key, value = torch.split_with_sizes(qkv, sizes, 1)
        self.keys[:, :, -1] = self.rotated(key)
        self.values[:, :, -1] = value
        mixed = scaled_dot_product_attention(
            self.rotated(query).unsqueeze(2), self.keys, self.values, enable_gqa=True
        )
        return linear(mixed.reshape(tokens, -1), self.out)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] in and out."""
        hidden = hidden + self.reduce(self.attention(self.attention_norm(hidden)))
        gate, up = linear(self.mlp_norm(hidden), self.gate_up).chunk(2, -1)
        return hidden + self.reduce(linear(silu(gate) * up, self.down))


class Decoder(nn.Module):
    """Layers and the final norm; two sites a layer."""

    def __init__(
        self,
        shape: Shape,
        layers: int,
        tokens: int,
        cache_length: int,
        weights: Weights,
        group: dist.ProcessGroup,
    ) -> None:
        """Make this rank's part."""
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(shape, tokens, cache_length, weights, group) for _ in range(layers)
        )
        self.norm = RMSNorm(1 + 0.1 * weights.shared(shape.hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """One decode step: [tokens, hidden size] in, the normed hidden states out."""
        for layer in self.layers:
            hidden = layer(hidden)
        return cast(torch.Tensor, self.norm(hidden))

"""What the tests of `fx-fusion explain` and `snapshot` give the commands: one file of a user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL = """
import torch
import torch.distributed as dist
from torch import nn

class Block(nn.Module):
    def __init__(self, world_size):
        super().__init__()
        self.down = nn.Linear(8192 // world_size, 4096, bias=False)
        self.norm = nn.RMSNorm(4096)

    def example_inputs(self, tokens, world_size):
        return torch.empty(tokens, 8192 // world_size), torch.empty(tokens, 4096)

    def forward(self, x, residual):
        y = self.down(x)
        dist.all_reduce(y)  # line 17
        h = residual + y
        return self.norm(h), h

def build(tokens, world_size):
    block = Block(world_size)
    return block, block.example_inputs(tokens, world_size)

def layer_norm(tokens):
    def f(x, residual):
        dist.all_reduce(x)
        return nn.functional.layer_norm(x + residual, (4096,))
    return f, (torch.empty(tokens, 4096),), {"residual": torch.empty(tokens, 4096)}

def by_size(tokens):
    def f(x):
        if x.shape[0] > 8:
            dist.all_reduce(x)
        return nn.functional.rms_norm(x, (4096,))
    return f, (torch.empty(tokens, 4096),)

def unsharded(tokens):
    return nn.Linear(4, 4), (torch.empty(tokens, 4),)

def wrong_shape(tokens):
    return nn.Linear(4, 4), (torch.empty(tokens, 5),)

def one_tensor(tokens):
    return nn.Linear(4, 4), torch.empty(tokens, 4)

def nothing(tokens):
    pass

def needs_hidden(tokens, hidden):
    pass

def raises(tokens):
    raise KeyError("weights")

def second_group():
    dist.init_process_group("gloo")

def needs_values():
    return nn.Linear(4, 4), (torch.empty(int(torch.ones(3).sum()), 4),)

class NoInputs(nn.Module):
    pass

NUMBER = 3
"""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def written(folder: Path) -> str:
    """Write the file; returns its path."""
    path = folder / "users_model.py"
    path.write_text(MODEL, encoding="utf-8")
    return str(path)

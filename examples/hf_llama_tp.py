"""A Hugging Face model, tensor-parallel by transformers' own plan, compiled with fx_fusion.

    python examples/hf_llama_tp.py                                 # a tiny random Llama
    torchrun --nproc-per-node 8 examples/hf_llama_tp.py --model /path/to/model --dtype bfloat16

Prints the fusion report on rank 0. transformers gives each rank a GPU where there are GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from launch import compare, fused_report, run
from transformers import DistributedConfig


def options() -> argparse.Namespace:
    """The command's options; every rank reads them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a local model directory; default: a tiny random Llama")
    parser.add_argument("--dtype", default="float32", help="a torch dtype")
    return parser.parse_args()


def save_tiny_llama(directory: str) -> None:
    """Save a small Llama with random weights; on rank 0 alone."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


@torch.no_grad()
def example(device: torch.device) -> str:
    """Load this rank's shard, run one compiled step, compare with eager."""
    chosen = options()
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # transformers takes the device from here
    with tempfile.TemporaryDirectory() as directory:
        names = [chosen.model or directory]
        if chosen.model is None and dist.get_rank() == 0:
            save_tiny_llama(directory)
        dist.broadcast_object_list(names)  # rank 0's folder, and only once it is filled
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            names[0],
            dtype=getattr(torch, chosen.dtype),
            distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto"),
        ).eval()
        dist.barrier()  # until all ranks have read it
    compiled: Any = torch.compile(model, backend="fx_fusion")
    ids = torch.arange(32, device=model.device).reshape(1, 32)
    difference = compare(compiled(ids).logits, model(ids).logits)
    return f"{fused_report(1)}\n{difference}"


def main() -> int:
    """Run the example on every rank."""
    options()  # a mistake in the command is better met here than on every rank
    return run(example)


if __name__ == "__main__":
    sys.exit(main())

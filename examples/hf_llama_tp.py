"""A Hugging Face model, tensor-parallel by transformers' own plan, compiled with fx_fusion.

    torchrun --nproc-per-node 2 examples/hf_llama_tp.py                     # a tiny random Llama
    torchrun --nproc-per-node 8 examples/hf_llama_tp.py --model /path/to/model --dtype bfloat16

Prints the fusion report on rank 0. On GPUs it needs one for each rank.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import DistributedConfig

import fx_fusion


def save_tiny_llama(directory: str) -> None:
    """Save a small Llama with random weights, the same in every process."""
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


def main() -> None:
    """Load this rank's shard, run one compiled step, print what was fused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a local model directory; default: a tiny random Llama")
    parser.add_argument("--dtype", default="float32", help="a torch dtype")
    options = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2:
        parser.error("start it with torchrun --nproc-per-node N, N at least 2.")

    with tempfile.TemporaryDirectory() as directory:
        if options.model is None:
            # Before the process group exists: afterwards only rank 0 would save.
            save_tiny_llama(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model or directory,
            dtype=getattr(torch, options.dtype),
            distributed_config=DistributedConfig(tp_size=world_size, tp_plan="auto"),
        ).eval()

    compiled: Any = torch.compile(model, backend="fx_fusion")
    ids = torch.arange(32, device=model.device).reshape(1, 32)
    with torch.no_grad():
        difference = (compiled(ids).logits - model(ids).logits).abs().max()
    if dist.get_rank() == 0:
        for report in fx_fusion.reports():
            print(report)
        print(f"largest difference from eager: {difference:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Runs the examples' own functions on the ranks that `spawn` starts, one after the other."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

import fx_fusion

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_examples(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, str]:
    """What each example returns on this rank; raises where its numbers are wrong."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["example"]
    texts = {}
    for name in names:
        fx_fusion.clear_reports()
        torch._dynamo.reset()
        module = importlib.import_module(name)
        if hasattr(module, "example"):
            texts[name] = str(module.example(torch.device("cpu")))
        else:
            text, difference = module.on_rank(rank, world_size, "cpu")
            texts[name] = f"{text}\nlargest difference from eager: {difference}"
    return texts

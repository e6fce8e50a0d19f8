"""Make, save and load the models of the zoo."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers
from transformers.distributed import DistributedConfig
from zoo import COMMON_OPTIONS, Architecture

WORLD_SIZE: Final = 2
#: Tokens of an input: no dimension of the graph has a size of another's.
BATCH: Final = 2
TOKENS: Final = 6

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def save(architecture: Architecture, directory: str) -> None:
    """Save the architecture with small random weights; before any process group exists.

    Norm weights and biases get random values too, so that one that is left out shows.
    """
    options = {**COMMON_OPTIONS, **architecture.options}
    config = getattr(transformers, architecture.config)(**options)
    torch.manual_seed(0)
    model = getattr(transformers, architecture.auto_class).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)


def load(architecture: Architecture, directory: str, dtype: torch.dtype) -> Any:
    """This rank's shard of a saved model, made tensor-parallel by transformers itself."""
    model = getattr(transformers, architecture.auto_class).from_pretrained(
        directory,
        dtype=dtype,
        distributed_config=DistributedConfig(tp_size=WORLD_SIZE, tp_plan=architecture.tp_plan),
    )
    return model.eval()


def inputs(architecture: Architecture, number: int = 0) -> dict[str, Any]:
    """Token ids [batch, tokens] that touch both halves of the vocabulary, no padding id.

    Args:
        architecture: What they are for.
        number: Which input; each is different.
    """
    size = COMMON_OPTIONS["vocab_size"]
    ids = (torch.arange(BATCH * TOKENS) * 37 + 11 * number) % (size - 1) + 1
    ids = ids.reshape(BATCH, TOKENS)
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if architecture.auto_class == "AutoModelForSeq2SeqLM":
        given["decoder_input_ids"] = ids.flip(1)
    return given

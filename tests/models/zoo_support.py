"""Make, save and load the models of the zoo, and capture the graph that the pass sees."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch import fx
from transformers.distributed import DistributedConfig
from zoo import COMMON_OPTIONS, Architecture

import fx_fusion
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.report import FusionReport
from fx_fusion.settings import FusionSettings

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


@dataclass(frozen=True)
class Captured:
    """What the pass made of a model's graph.

    Attributes:
        report: The report of its one graph.
        all_reduces: How many all_reduces the rewritten graph still has.
        fused_ops: How many fused ops it has.
    """

    report: FusionReport
    all_reduces: int
    fused_ops: int


def count(graph: fx.Graph, target: object) -> int:
    """How many nodes of a graph call `target`."""
    return sum(node.op == "call_function" and node.target is target for node in graph.nodes)


class _Seen(BaseException):
    """Ends a compilation once the graph has been seen; no error, so nobody catches it."""


def capture(model: Any, given: Mapping[str, Any], **settings: Any) -> Captured:
    """Compile a model as far as our pass, and no further.

    Raises:
        AssertionError: The model's graph never came to the pass.
    """
    graphs: list[fx.Graph] = []
    reports: list[FusionReport] = []
    fusion = FusionPass(FusionSettings(**settings))

    def look(graph: fx.Graph) -> None:
        fx_fusion.clear_reports()
        fusion(graph, True)
        graphs.append(graph)
        reports.extend(fx_fusion.reports())
        raise _Seen

    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(
        model, fullgraph=True, options={"post_grad_custom_post_pass": look}
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # transformers' and Inductor's, on every MoE model
        with suppress(_Seen):
            compiled(**given)
    assert len(graphs) == 1, "the model's graph never came to the pass"
    (report,) = reports
    return Captured(
        report=report,
        all_reduces=count(graphs[0], torch.ops._c10d_functional.all_reduce.default),
        fused_ops=count(graphs[0], torch.ops.fx_fusion.all_reduce_add_rms_norm.default),
    )

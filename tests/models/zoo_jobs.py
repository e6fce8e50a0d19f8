"""What each process of `test_zoo_run` does; a module of its own, so that it imports fast."""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from zoo import BY_NAME
from zoo_support import inputs, load

import fx_fusion
from fx_fusion.report import FusionReport

#: Different inputs to one compiled model: a buffer that isn't renewed between calls shows.
INPUTS: Final = 3
#: C++ compiles sooner without vector code.
SCALAR_CODE: Final = {"cpp.vec_isa_ok": False}
_ALL_REDUCE: Final = re.compile(r"_c10d_functional\.all_reduce_?\.default\(")


@dataclass(frozen=True)
class RankResult:
    """What one rank saw.

    Attributes:
        reports: One for each graph that was compiled.
        all_reduces: How many all_reduces the generated code calls.
        difference: The largest absolute difference of a logit from eager.
        largest_logit: The largest absolute logit of eager.
        digest: SHA-256 of all logits of the compiled model.
    """

    reports: list[FusionReport]
    all_reduces: int
    difference: float
    largest_logit: float
    digest: str


def run_compiled(
    rank: int, world_size: int, name: str, directory: str, dtype: str, options: dict[str, Any]
) -> RankResult:
    """Run an architecture's shard eagerly and compiled with fx_fusion on the same inputs.

    Args:
        rank: This process' number.
        world_size: How many there are.
        name: Of the architecture.
        directory: Where it is saved.
        dtype: The name of a torch dtype.
        options: Inductor's options.
    """
    architecture = BY_NAME[name]
    warnings.simplefilter("ignore")  # transformers' and Inductor's, on every MoE model
    model = load(architecture, directory, getattr(torch, dtype))
    given = [inputs(architecture, number) for number in range(INPUTS)]
    compiled: Any = torch.compile(model, backend="fx_fusion", fullgraph=True, options=options)
    # Without the caches, so that there is code to look at on every rank.
    with (
        torch.no_grad(),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        expected = [model(**kwargs).logits for kwargs in given]
        first, code = run_and_get_code(lambda: compiled(**given[0]).logits)
        logits = [first, *(compiled(**kwargs).logits for kwargs in given[1:])]
    digest = hashlib.sha256()
    for tensor in logits:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return RankResult(
        reports=fx_fusion.reports(),
        all_reduces=sum(len(_ALL_REDUCE.findall(text)) for text in code),
        difference=max(map(_difference, logits, expected)),
        largest_logit=max(float(tensor.abs().max()) for tensor in expected),
        digest=digest.hexdigest(),
    )


def _difference(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference; inf where one is not finite."""
    difference = (given.double() - expected.double()).abs()
    return float(difference.max()) if bool(difference.isfinite().all()) else float("inf")

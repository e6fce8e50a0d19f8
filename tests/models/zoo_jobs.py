"""What each process of `test_zoo_run` does; a module of its own, so that it imports fast."""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from routing import Followed, Noted
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
        difference: The largest absolute difference of a logit from eager, with experts chosen
            as the compiled model did.
        largest_logit: The largest absolute logit of eager.
        choices: How often experts were chosen, a token of a layer each.
        differing: How many of these choices eager would have made otherwise.
        shortfall: How much worse than its own choice eager finds the worst of them, see
            `routing.Followed`.
        digest: SHA-256 of all logits of the compiled model.
    """

    reports: list[FusionReport]
    all_reduces: int
    difference: float
    largest_logit: float
    choices: int
    differing: int
    shortfall: float
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
    noted = Noted()

    def run(number: int) -> torch.Tensor:
        # Without experts as users run it; the mode only notes, but Dynamo has to trace it.
        with noted if architecture.has_experts else contextlib.nullcontext():
            logits: torch.Tensor = compiled(**given[number]).logits
        return logits

    # Without the caches, so that there is code to look at on every rank.
    with (
        torch.no_grad(),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        first, code = run_and_get_code(lambda: run(0))
        logits, choices = [first], [noted.choices[:]]
        for number in range(1, INPUTS):
            noted.choices.clear()
            logits.append(run(number))
            choices.append(noted.choices[:])
        followed = [Followed(chosen) for chosen in choices]
        expected = []
        for mode, kwargs in zip(followed, given, strict=True):
            with mode:
                expected.append(model(**kwargs).logits)
            mode.finish()
    digest = hashlib.sha256()
    for tensor in logits:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return RankResult(
        reports=fx_fusion.reports(),
        all_reduces=sum(len(_ALL_REDUCE.findall(text)) for text in code),
        difference=max(map(_difference, logits, expected)),
        largest_logit=max(float(tensor.abs().max()) for tensor in expected),
        choices=sum(indices[..., 0].numel() for chosen in choices for indices in chosen),
        differing=sum(mode.differing for mode in followed),
        shortfall=max(mode.shortfall for mode in followed),
        digest=digest.hexdigest(),
    )


def _difference(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference; inf where one is not finite."""
    difference = (given.double() - expected.double()).abs()
    return float(difference.max()) if bool(difference.isfinite().all()) else float("inf")

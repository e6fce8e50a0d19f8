"""What each process of the demo does: run a model eagerly, compiled, and compiled with fx_fusion.

A module of its own, so that the results of the processes can be pickled under a real module's
name (`python -m fx_fusion.demo` runs as `__main__`).
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

import fx_fusion
from fx_fusion.report import FusionReport

#: The three ways the model is run, in the order they are printed.
EAGER: Final = "eager"
INDUCTOR: Final = "inductor"
FUSED: Final = "fx_fusion"

HEAD_SIZE: Final = 32
VOCABULARY: Final = 512
#: Different inputs that results are compared on; more than one, so that a buffer which is not
#: renewed between calls shows.
BATCHES: Final = 3
#: Untimed rounds before the timed ones.
WARM_UP: Final = 3


@dataclass(frozen=True)
class Job:
    """What the processes are told.

    Attributes:
        directory: An empty folder that all ranks see; the model is saved there.
        layers: Decoder layers.
        hidden_size: Hidden size; a multiple of the head size times the number of ranks.
        dtype: The name of a torch dtype.
        device: "cpu" or "cuda".
        batch: Sequences in an input.
        tokens: Tokens in a sequence.
        steps: Timed rounds.
    """

    directory: str
    layers: int
    hidden_size: int
    dtype: str
    device: str
    batch: int
    tokens: int
    steps: int


@dataclass(frozen=True)
class RankResult:
    """What one process saw.

    Attributes:
        report: The fusion report of what it compiled.
        differences: For each compiled way, the largest absolute difference of a logit from
            eager, over all inputs it was run on.
        largest_logit: The largest absolute logit of eager.
        digest: SHA-256 of the bytes of all logits that the fx_fusion graph gave.
        seconds: For eager and fx_fusion, the median time of a step in seconds.
        decode_seconds: For each way, that of a step with one token a sequence, as in decoding.
        compile_seconds: How long the first call with fx_fusion took, in seconds.
    """

    report: FusionReport
    differences: dict[str, float]
    largest_logit: float
    digest: str
    seconds: dict[str, float]
    decode_seconds: dict[str, float]
    compile_seconds: float


def run_rank(rank: int, world_size: int, job: Job) -> RankResult:
    """Load this rank's shard, run the model the three ways, compare and time them."""
    if rank == 0:
        save_model(job)
    dist.barrier()
    torch.manual_seed(0)
    model = load_shard(rank, world_size, job)
    inputs = [torch.randint(VOCABULARY, (job.batch, job.tokens)) for _ in range(BATCHES)]
    inputs = [ids.to(model.device) for ids in inputs]
    decode_inputs = [ids[:, :1].contiguous() for ids in inputs]
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        EAGER: lambda ids: logits_of(model, ids),
    }
    with torch.no_grad():
        expected = [ways[EAGER](ids) for ids in inputs]
        expected_decode = [ways[EAGER](ids) for ids in decode_inputs]

        # A graph for each length: torch 2.13 can't trace DTensor embeddings of symbolic shapes.
        compiled = torch.compile(model, backend=INDUCTOR, dynamic=False)
        ways[INDUCTOR] = lambda ids: logits_of(compiled, ids)
        # Compiling Inductor's kernels takes most of the demo's time: one length is enough.
        unfused = [ways[INDUCTOR](ids) for ids in decode_inputs]

        fx_fusion.clear_reports()
        fused_model = torch.compile(
            model, backend=FUSED, options={"kernel": kernel_for(job.device)}, dynamic=False
        )
        ways[FUSED] = lambda ids: logits_of(fused_model, ids)
        start = time.perf_counter()
        fused = [ways[FUSED](ids) for ids in inputs]
        compile_seconds = time.perf_counter() - start
        report = FusionReport.merged(fx_fusion.reports())
        fused += [ways[FUSED](ids) for ids in decode_inputs]

        decode_seconds = time_ways(ways, decode_inputs[0], job.steps)
        del ways[INDUCTOR]
        seconds = time_ways(ways, inputs[0], job.steps)
    return RankResult(
        report=report,
        differences={
            INDUCTOR: largest_difference(unfused, expected_decode),
            FUSED: largest_difference(fused, expected + expected_decode),
        },
        largest_logit=max(float(logits.abs().max()) for logits in expected),
        digest=digest(fused),
        seconds=seconds,
        decode_seconds=decode_seconds,
        compile_seconds=compile_seconds,
    )


def kernel_for(device: str) -> str:
    """The `kernel` setting: the demo shows the fusion on GPUs too that no one has measured.

    AMD's have not even run our kernels, so there it is the op's unfused path.
    """
    if device == "cpu":
        return "auto"
    return "unfused" if torch.version.hip else "fx_fusion"


def save_model(job: Job) -> None:
    """Make the model with random weights and save it; to be called on rank 0 alone.

    With torch.distributed up, transformers saves on rank 0 and does nothing on the others.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    heads = job.hidden_size // HEAD_SIZE
    config = transformers.LlamaConfig(
        hidden_size=job.hidden_size,
        intermediate_size=3 * job.hidden_size,
        num_hidden_layers=job.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * job.tokens,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, job.dtype))
    model.save_pretrained(job.directory)


def load_shard(rank: int, world_size: int, job: Job) -> Any:
    """This rank's part of the saved model, made tensor-parallel by transformers itself."""
    import transformers
    from transformers import DistributedConfig

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if job.device == "cuda":
        # transformers takes the device from here; with fewer GPUs than ranks they share.
        os.environ["LOCAL_RANK"] = str(rank % torch.cuda.device_count())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.directory,
        dtype=getattr(torch, job.dtype),
        distributed_config=DistributedConfig(tp_size=world_size, tp_plan="auto"),
    )
    return model.eval()


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits [batch, tokens, vocabulary] of a model for token ids [batch, tokens]."""
    logits = model(input_ids=ids, use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def largest_difference(given: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest absolute difference; inf where a value is not finite."""
    worst = 0.0
    for one, other in zip(given, expected, strict=True):
        difference = (one.double() - other.double()).abs()
        if not bool(difference.isfinite().all()):
            return float("inf")
        worst = max(worst, float(difference.max()))
    return worst


def digest(tensors: list[torch.Tensor]) -> str:
    """SHA-256 of the tensors' bytes, so that ranks can be compared bit for bit."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten()
        total.update(bytes(flat.view(torch.uint8).tolist()))
    return total.hexdigest()


def time_ways(
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]], ids: torch.Tensor, steps: int
) -> dict[str, float]:
    """The median time of a step for each way, in seconds; see `step_seconds`."""
    seconds = step_seconds(ways, ids, steps, warm_up=WARM_UP)
    return {name: statistics.median(values) for name, values in seconds.items()}


def step_seconds(
    ways: Mapping[str, Callable[[torch.Tensor], object]],
    ids: torch.Tensor,
    steps: int,
    *,
    warm_up: int,
) -> dict[str, list[float]]:
    """The time of each of `steps` steps for each way, in seconds, after `warm_up` untimed ones.

    The ways take turns, so that what else the machine does falls on all of them alike. The
    ranks start each step together.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(warm_up + steps):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way(ids)
            if ids.device.type == "cuda":
                torch.cuda.synchronize()
            if step >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds

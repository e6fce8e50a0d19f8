"""What the examples share: start the ranks, compare with eager. Not an example itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fx_fusion
from fx_fusion.errors import SpawnError
from fx_fusion.testing import spawn

Example = Callable[[torch.device], str]


def run(example: Example, *, world_size: int = 2) -> int:
    """Run an example on every rank and print what rank 0 returns; the exit status.

    Under torchrun the ranks exist already, on GPUs where each has one of its own. Otherwise
    `world_size` processes are started on this machine, sharing a GPU if they must.
    """
    try:
        if "LOCAL_RANK" in os.environ:
            text, first = _under_torchrun(example)
        else:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            texts = spawn(
                on_rank, world_size, device=device, timeout=600, args=(example, device)
            )
            text, first = texts[0], True
    except (AssertionError, SpawnError) as error:
        print(error, file=sys.stderr)
        return 1
    if first:
        print(text)
    return 0


def on_rank(rank: int, world_size: int, example: Example, device: str) -> str:
    """Run an example on one of the processes that `spawn` started."""
    del rank, world_size
    if device == "cuda":  # spawn has chosen which
        return example(torch.device("cuda", torch.cuda.current_device()))
    return example(torch.device(device))


def _under_torchrun(example: Example) -> tuple[str, bool]:
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local)
        device, backend = torch.device("cuda", local), "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend)
    try:
        return example(device), dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def compare(given: Any, expected: Any) -> str:
    """Say how far compiled results are from eager's; AssertionError if that is too far.

    Compiled code may round where eager doesn't: 64 roundings of the largest value are allowed.
    """
    worst = 0.0
    for one, other in zip(_tensors(given), _tensors(expected), strict=True):
        limit = 64 * torch.finfo(other.dtype).eps * float(other.abs().max())
        difference = float((one.float() - other.float()).abs().max())
        # Not ">": a NaN must not pass.
        assert difference <= limit, f"{difference:.2e} from eager, more than {limit:.2e}"
        worst = max(worst, difference)
    return f"largest difference from eager: {worst:.2e}"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def fused_report(least: int) -> str:
    """The reports of what this process compiled; AssertionError if fewer sites were fused."""
    report = fx_fusion.FusionReport.merged(fx_fusion.reports())
    assert report.fused_count >= least, f"expected {least} fused sites at least:\n{report}"
    return str(report)


def random_tensor(*shape: int, device: torch.device, seed: int) -> torch.Tensor:
    """Random numbers that depend on the seed alone: equal on all ranks for equal seeds."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.div(shape[-1] ** 0.5).to(device)

"""FlashInfer's all_reduce + add + RMSNorm as a candidate of the kernels benchmark.

FlashInfer (its extra isn't needed for anything else) runs here through its TensorRT-LLM kernels,
which every release since 0.6.0 has under the same names, with fp32 accumulation. Four variants
are measured: one-shot and two-shot, each with programmatic dependent launch and without.

Its first use compiles for minutes, so `build_cause` does that once, before the ranks start.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

_Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
#: Name of the variant: (one-shot, programmatic launch).
VARIANTS: Final = {
    "flashinfer one-shot": (True, False),
    "flashinfer one-shot pdl": (True, True),
    "flashinfer two-shot": (False, False),
    "flashinfer two-shot pdl": (False, True),
}
#: Ranks its kernels are compiled for.
WORLD_SIZES: Final = (2, 4, 8, 16)
#: Ranks times tokens up to which its waiting blocks surely fit a GPU that the ranks share: 256
#: hung at world size 4.
SHARED_GPU_LIMIT: Final = 128
#: Below it, two-shot isn't run: it took 17 to 68 us there with 2 GPUs, one-shot 5 to 6.
TWO_SHOT_TOKENS: Final = 64
#: Bytes that all ranks' rows may take: it computes offsets in 32-bit integers.
MOST_BYTES: Final = 2**30 - 1
_MODULE: Final = "flashinfer.comm.trtllm_ar"
_BUILD: Final = f"import {_MODULE} as m; m.get_trtllm_comm_module()"


def build_cause(timeout: float) -> str:
    """Compile and load its kernels in a process of their own; why that failed, "" if it didn't."""
    if importlib.util.find_spec("flashinfer") is None:
        return "it isn't installed"
    process = subprocess.Popen(
        [sys.executable, "-c", _BUILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its compilers can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"its kernels weren't compiled within {timeout:.0f} s"
    if process.returncode == 0:
        return ""
    lines = [line for line in output.splitlines() if line.strip()]
    return f"its kernels can't be compiled: {lines[-1].strip() if lines else 'no message'}"


def cell_cause(
    one_shot: bool,
    world_size: int,
    tokens: int,
    hidden_size: int,
    element_size: int,
    shares_gpu: bool,
) -> str:
    """Why a variant isn't run at a size; "" if it is. The same on every rank.

    Args:
        one_shot: Which algorithm.
        world_size: Ranks in the group.
        tokens: Rows.
        hidden_size: Elements of a row.
        element_size: Bytes of an element.
        shares_gpu: Several ranks run on one GPU.
    """
    if world_size not in WORLD_SIZES:
        return f"it has no kernel for {world_size} ranks"
    if hidden_size * element_size % 16:
        return f"its rows are multiples of 16 bytes, not {hidden_size * element_size}"
    if not one_shot and tokens <= world_size:
        return f"its two-shot needs more tokens than ranks, not {tokens} for {world_size}"
    if not one_shot and tokens < TWO_SHOT_TOKENS:
        return (
            f"its two-shot is measured from {TWO_SHOT_TOKENS} tokens on; below it is far slower"
        )
    if world_size * tokens * hidden_size * element_size > MOST_BYTES:
        return "all ranks' rows together are 1 GiB or more"
    if shares_gpu and world_size * tokens > SHARED_GPU_LIMIT:
        return (
            f"{world_size} ranks times {tokens} tokens may not fit one GPU (at most"
            f" {SHARED_GPU_LIMIT}), and blocks that don't fit hang"
        )
    return ""


@dataclass(frozen=True)
class Workspace:
    """Its shared memory, made once for the largest size of a run."""

    module: Any
    pointers: torch.Tensor
    handles: Any
    rank: int
    world_size: int

    def step(self, one_shot: bool, programmatic: bool) -> _Step:
        """The variant as a function from (x, residual, weight) to (norm, new residual)."""
        pattern = self.module.AllReduceFusionPattern.kARResidualRMSNorm
        layout = self.module.QuantizationSFLayout.SWIZZLED_128x4

        def run(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            norm, hidden = torch.empty_like(x), torch.empty_like(x)
            tokens, hidden_size = x.shape
            self.module.trtllm_allreduce_fusion(
                allreduce_in=x,
                world_size=self.world_size,
                world_rank=self.rank,
                token_num=tokens,
                hidden_dim=hidden_size,
                workspace_ptrs=self.pointers,
                launch_with_pdl=programmatic,
                trigger_completion_at_end=programmatic,
                fp32_acc=True,
                pattern_code=pattern,
                use_oneshot=one_shot,
                allreduce_out=None,
                residual_in=residual,
                residual_out=hidden,
                norm_out=norm,
                quant_out=None,
                scale_out=None,
                rms_gamma=weight,
                rms_eps=1e-6,
                scale_factor=None,
                layout_code=layout,
            )
            return norm, hidden

        return run


def load() -> Any:
    """Its module with the kernels loaded; raises whatever FlashInfer raises. Not collective."""
    with contextlib.redirect_stdout(io.StringIO()):
        module = importlib.import_module(_MODULE)
        module.get_trtllm_comm_module()
    return module


def make_workspace(
    module: Any,
    sizes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> Workspace:
    """Shared memory for the largest of the sizes (tokens, hidden size). Collective."""
    tokens, hidden_size = max(sizes, key=lambda size: size[0] * size[1])
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every address
        handles, pointers = module.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            group.rank(),
            group.size(),
            tokens,
            hidden_size,
            use_fp32_lamport=dtype == torch.float32,
            group=group,
        )
    return Workspace(module, pointers, handles, group.rank(), group.size())


def version() -> str:
    """The installed version, "" if there is none."""
    for name in ("flashinfer-python", "flashinfer"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""

"""FlashInfer's fused all_reduce + add + RMSNorm behind the op: an optional library.

`flashinfer_rules` says which calls come here. Releases from 0.6.11 on are called through the
unified interface, those before 0.6.10 through the functions below it, which alone take a group.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from fx_fusion.lowering import flashinfer_rules as rules

cause: Final = rules.cause
algorithm: Final = rules.algorithm
#: Its memory is one size for all shapes of as many elements.
_HIDDEN_SIZE: Final = 1024


class Made(NamedTuple):
    """Its shared memory.

    Attributes:
        workspace: Of the unified interface; else a tensor of addresses.
        handles: What has to live as long.
        rank: This rank in the group.
        world_size: Ranks in the group.
    """

    workspace: Any
    handles: Any
    rank: int
    world_size: int


def kind_of(dtype: torch.dtype) -> str:
    """Dtypes that share its memory: those of 2 bytes, and float32."""
    return "float32" if dtype == torch.float32 else "16 bits"


def facts() -> rules.Version:
    """The release that is installed, its kernels compiled and loaded; that may take minutes.

    Raises:
        Exception: Whatever it raises.
    """
    version = rules.parsed(importlib.metadata.version("flashinfer-python"))
    if version is None:
        raise RuntimeError("the release of FlashInfer that is installed has no number")
    with contextlib.redirect_stdout(io.StringIO()):
        _kernels().get_trtllm_comm_module()
    return version


def make(
    version: rules.Version, group: dist.ProcessGroup, device: torch.device, kind: str
) -> Made:
    """Its memory for a group. Collective; `device` is the current one."""
    del device
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    rank, world_size = group.rank(), group.size()
    tokens = rules.capacity(world_size, dtype.itemsize) // _HIDDEN_SIZE
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every address
        if version >= rules.TAKES_GROUP:
            workspace = _unified().create_allreduce_fusion_workspace(
                backend="trtllm",
                world_size=world_size,
                rank=rank,
                max_token_num=tokens,
                hidden_dim=_HIDDEN_SIZE,
                dtype=dtype,
                group=group,
            )
            return Made(workspace, None, rank, world_size)
        handles, pointers = _kernels().trtllm_create_ipc_workspace_for_all_reduce_fusion(
            rank,
            world_size,
            tokens,
            _HIDDEN_SIZE,
            use_fp32_lamport=dtype == torch.float32,
            group=group,
        )
        return Made(pointers, handles, rank, world_size)


def call(
    made: Made,
    version: rules.Version,
    algorithm: str,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    one_plus_weight: bool,
    results: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """One call on the current stream.

    Equals, with the sum over ranks in rank order in fp32,

        hidden = residual + sum(x).to(x.dtype)
        norm = (hidden.float() * rsqrt(mean(hidden.float() ** 2) + eps) * weight).to(x.dtype)

    Args:
        made: Its memory.
        version: Its release.
        algorithm: "one-shot" or "two-shot".
        given: x and residual [tokens, hidden size], weight [hidden size], contiguous, one dtype.
        eps: Added to the mean square.
        one_plus_weight: The weight is 1 + `weight`.
        results: Where norm and hidden go, [tokens, hidden size].
    """
    x, residual, weight = given
    norm, hidden = results
    pattern = _kernels().AllReduceFusionPattern.kARResidualRMSNorm
    programmatic, one_shot = rules.programmatic(version), algorithm == "one-shot"
    if version >= rules.TAKES_GROUP:
        _unified().allreduce_fusion(
            input=x,
            workspace=made.workspace,
            pattern=pattern,
            launch_with_pdl=programmatic,
            trigger_completion_at_end=True,
            output=norm,  # not written by this pattern; without it one is allocated
            residual_out=hidden,
            norm_out=norm,
            residual_in=residual,
            rms_gamma=weight,
            rms_eps=eps,
            use_oneshot=one_shot,
            fp32_acc=True,
            **({"weight_bias": 1.0} if one_plus_weight else {}),
        )
        return
    _kernels().trtllm_allreduce_fusion(
        allreduce_in=x,
        world_size=made.world_size,
        world_rank=made.rank,
        token_num=x.shape[0],
        hidden_dim=x.shape[1],
        workspace_ptrs=made.workspace,
        launch_with_pdl=programmatic,
        trigger_completion_at_end=True,
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
        rms_eps=eps,
        scale_factor=None,
        layout_code=None,
    )


def close(made: Made, version: rules.Version, group: dist.ProcessGroup) -> None:
    """Give its memory up. Collective."""
    if version >= rules.TAKES_GROUP:
        made.workspace.destroy()
    else:
        _kernels().trtllm_destroy_ipc_workspace_for_all_reduce_fusion(made.handles, group)


def _kernels() -> Any:
    return importlib.import_module("flashinfer.comm.trtllm_ar")


def _unified() -> Any:
    return importlib.import_module("flashinfer.comm")

"""AITER's fused all_reduce + add + RMSNorm behind the op: an optional library for AMD GPUs.

`aiter_rules` says which calls come here. The calls follow the sources of its releases; they have
not been run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import os
from typing import Any, Final

import torch
import torch.distributed as dist

from fx_fusion.lowering import aiter_rules as rules

cause: Final = rules.cause
algorithm: Final = rules.algorithm
#: Overrides `aiter_rules.ONE_STAGE_BYTES`; has to be the same on every rank.
ONE_STAGE_VARIABLE: Final = "FX_FUSION_AITER_ONE_STAGE_BYTES"
_MODULE: Final = "aiter.dist.device_communicators.custom_all_reduce"


def kind_of(_: torch.dtype) -> str:
    """Dtypes that share its memory: all."""
    return "any"


def facts() -> rules.Release:
    """What is installed, its kernels compiled and loaded; that may take minutes.

    Raises:
        Exception: Whatever it raises.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        module = importlib.import_module(_MODULE)
        if not module.custom_ar:
            raise RuntimeError("AITER's custom all_reduce can't be loaded")
    parameters = inspect.signature(module.CustomAllreduce.fused_ar_rms).parameters
    limit = os.environ.get(ONE_STAGE_VARIABLE, str(rules.ONE_STAGE_BYTES))
    if not limit.isdecimal():
        raise ValueError(f"{ONE_STAGE_VARIABLE}={limit!r} is not a number of bytes")
    return rules.Release(
        _version(), "use_1stage" in parameters, "gemma_norm" in parameters, int(limit)
    )


def _version() -> str:
    for name in ("amd-aiter", "aiter"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"


def make(release: rules.Release, group: dist.ProcessGroup, device: torch.device, _: str) -> Any:
    """Its memory for a group, which must not be NCCL's alone. Collective."""
    del release
    module = importlib.import_module(_MODULE)
    with contextlib.redirect_stdout(io.StringIO()):
        made = module.CustomAllreduce(group, device)
    if made.disabled:
        raise RuntimeError(
            "AITER's CustomAllreduce is disabled for this group; its log says why. The ranks"
            " must be on one host, and a group needs gloo beside NCCL"
            ' (init_process_group("cpu:gloo,cuda:nccl"))'
        )
    return made


def call(
    made: Any,
    release: rules.Release,
    algorithm: str,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    one_plus_weight: bool,
    results: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """One call on the current stream; arguments as of `flashinfer_backend.call`.

    Equals, with the sum over ranks in rank order in fp32,

        sum = residual.float() + sum(x).to(x.dtype).float();   hidden = sum.to(x.dtype)
        norm = (sum * rsqrt(mean(sum ** 2) + eps) * weight).to(x.dtype)

    x is copied to where the other ranks can read it, in graphs too, so that nothing has to be
    registered after a capture.
    """
    del release
    x, residual, weight = given
    norm, hidden = results
    made.fused_ar_rms(
        x,
        residual,
        res_out=hidden,
        out=norm,
        w=weight,
        eps=eps,
        registered=False,
        use_1stage=algorithm == "one-stage",
        **({"gemma_norm": True} if one_plus_weight else {}),
    )


def close(made: Any, release: rules.Release, group: dist.ProcessGroup) -> None:
    """Give its memory up. Collective."""
    del release, group
    made.close()

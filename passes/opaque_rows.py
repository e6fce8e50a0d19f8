"""Rows that describe opaque ops as data, and the rows of FlashInfer's and vLLM's ops.

Ops are named by string, so neither library is imported, and a row whose op doesn't exist costs
nothing. `registry` looks rows up and adds users' own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from fx_fusion.lowering.norm_form import NormForm

#: A result of an op: its index among the returned values, or the name of the mutated argument.
Result = int | str
GroupResolver = Callable[[str], "str | None"]


@dataclass(frozen=True)
class NormRow:
    """An opaque RMSNorm; the fields are `registry.register_rms_norm`'s arguments.

    Attributes:
        rounds_to: Which dtype a cast before the weight gives: x's own, or the weight's.
    """

    name: str
    x: str
    weight: str | None
    eps: str | float
    out: Result
    form: NormForm
    residual: str | None = None
    residual_out: Result | None = None
    ignore: tuple[str, ...] = ()
    rounds_to: Literal["x", "weight"] = "x"


@dataclass(frozen=True)
class AllReduceRow:
    """An opaque all_reduce; the fields are `registry.register_all_reduce`'s arguments."""

    name: str
    x: str
    group: str
    resolve_group: GroupResolver | None = None
    ignore: tuple[str, ...] = ()


def _vllm_group(name: str) -> str | None:
    """The c10d name of the device group behind a vLLM group name ("tp:0"), if vLLM runs."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    reference = getattr(state, "_groups", {}).get(name) if state is not None else None
    coordinator = reference() if reference is not None else None
    group = getattr(coordinator, "device_group", None)
    return getattr(group, "group_name", None)


def _row(name: str, out: Result, eps: str, form: NormForm, *ignore: str) -> NormRow:
    return NormRow(name, "input", "weight", eps, out, form, ignore=ignore)


def _add_row(name: str, eps: str, form: NormForm, *ignore: str) -> NormRow:
    row = _row(name, "input", eps, form, *ignore)
    return replace(row, residual="residual", residual_out="residual")


def _ir_row(name: str, residual: str | None = None, out: Result | None = None) -> NormRow:
    row = NormRow(name, "x", "weight", "epsilon", 0, _FIRST, residual, out)
    return replace(row, rounds_to="weight")


# FlashInfer multiplies by the weight in fp32 and rounds once; vLLM's CUDA kernels round first,
# its IR ops to the weight's dtype. The add-and-norm ops of FlashInfer and of vLLM's IR norm the
# sum before it is rounded, the fused op always the rounded one: there the last bit can differ.
_ONCE: Final = NormForm("w", "after_weight")
_GEMMA: Final = NormForm("1+w", "after_weight")
_FIRST: Final = NormForm("w", "before_weight")
#: Launch overlapped with the kernel before: no part of the result.
_PDL: Final = "enable_pdl"
NORMS: Final[dict[str, NormRow]] = {
    row.name: row
    for row in (
        _row("flashinfer::rmsnorm", "out", "eps", _ONCE, _PDL),
        _row("flashinfer::gemma_rmsnorm", "out", "eps", _GEMMA, _PDL),
        _add_row("flashinfer::fused_add_rmsnorm", "eps", _ONCE, _PDL),
        _add_row("flashinfer::gemma_fused_add_rmsnorm", "eps", _GEMMA, _PDL),
        _row("_C::rms_norm", "result", "epsilon", _FIRST),
        _add_row("_C::fused_add_rms_norm", "epsilon", _FIRST),
        _ir_row("vllm_ir::rms_norm"),
        _ir_row("vllm_ir::fused_add_rms_norm", "x_residual", 1),
    )
}
ALL_REDUCES: Final[dict[str, AllReduceRow]] = {
    "vllm::all_reduce": AllReduceRow("vllm::all_reduce", "tensor", "group_name", _vllm_group),
}

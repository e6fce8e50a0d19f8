"""Run a site on the CPU kernel: fill in the call, check that the kernel can take it.

Equal to the eager lines of `unfused.py`, with the sum over ranks in rank order in fp32:

    reduced = sum(x of rank 0, rank 1, ...).to(x.dtype)
    h = residual + (reduced.to(add_dtype) + bias) * scale
    norm = (h32 * rsqrt(mean(h32^2) + eps)).to(norm_dtype) * weight

Reduced value and hidden state are bitwise equal to that, the norm is within one ulp (another
order of adding up the squares).
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from fx_fusion.lowering.arguments import Arguments, Results, result_dtypes
from fx_fusion.lowering.cpu_workspace import CpuWorkspace
from fx_fusion.lowering.select import cpu_is_two_shot

_DTYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_WEIGHT_FORMS: Final = {"none": 0, "w": 1, "1+w": 2}
_RECIPROCALS: Final = {"rsqrt": 0, "pow": 0, "sqrt": 1}

#: From how many elements on a call is worth more than one thread.
PARALLEL_ELEMENTS: Final = 32 * 1024

_POINTERS: Final = (
    "x",
    "residual",
    "weight",
    "bias",
    "norm",
    "residual_out",
    "reduced",
    "rstd",
)
_INTEGERS: Final = (
    "has_scale",
    "x_dtype",
    "residual_dtype",
    "weight_dtype",
    "bias_dtype",
    "cast_dtype",
    "bias_out_dtype",
    "hidden_dtype",
    "norm_dtype",
    "product_dtype",
    "out_dtype",
    "weight_form",
    "reciprocal",
    "threads",
    "two_shot",
)


class _Call(ctypes.Structure):
    """`Call` of the kernel's source, field by field."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [("tokens", ctypes.c_int64), ("hidden", ctypes.c_int64)]
        + [("eps", ctypes.c_float), ("scale", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in _INTEGERS]
    )


def run(arguments: Arguments, workspace: CpuWorkspace) -> Results:
    """Run one site over the group's shared memory; results are new contiguous tensors."""
    x = arguments.x.contiguous()
    hidden_size = x.shape[-1]
    tokens = x.numel() // hidden_size
    norm_dtype, hidden_dtype = result_dtypes(arguments)
    results = Results(
        x.new_empty(x.shape if arguments.want_norm else (0,), dtype=norm_dtype),
        x.new_empty(x.shape if arguments.want_residual else (0,), dtype=hidden_dtype),
        x.new_empty(x.shape if arguments.want_reduced else (0,)),
        x.new_empty((*x.shape[:-1], 1) if arguments.want_rstd else (0,), dtype=torch.float32),
    )
    if tokens == 0:
        return results
    residual, weight, bias = (
        None if value is None else value.contiguous()
        for value in (arguments.residual, arguments.weight, arguments.bias)
    )
    scale = _number(arguments.scale_tensor, arguments.scale)
    cast = arguments.add_dtype or x.dtype
    with_bias = cast if bias is None else torch.promote_types(cast, bias.dtype)
    before_weight = arguments.norm_dtype or torch.float32
    product = before_weight
    if weight is not None:
        factor = torch.float32 if arguments.weight_form == "1+w" else weight.dtype
        product = torch.promote_types(before_weight, factor)
    call = _Call(
        x=x.data_ptr(),
        residual=_pointer(residual),
        weight=_pointer(weight),
        bias=_pointer(bias),
        norm=_pointer(results.norm if arguments.want_norm else None),
        residual_out=_pointer(results.residual if arguments.want_residual else None),
        reduced=_pointer(results.reduced if arguments.want_reduced else None),
        rstd=_pointer(results.rstd if arguments.want_rstd else None),
        tokens=tokens,
        hidden=hidden_size,
        eps=_number(arguments.eps_tensor, arguments.eps),
        scale=scale,
        has_scale=scale != 1.0,
        x_dtype=_DTYPES[x.dtype],
        residual_dtype=_code(residual),
        weight_dtype=_code(weight),
        bias_dtype=_code(bias),
        cast_dtype=_DTYPES[cast],
        bias_out_dtype=_DTYPES[with_bias],
        hidden_dtype=_DTYPES[hidden_dtype],
        norm_dtype=_DTYPES[before_weight],
        product_dtype=_DTYPES[product],
        out_dtype=_DTYPES[norm_dtype],
        weight_form=_WEIGHT_FORMS[arguments.weight_form],
        reciprocal=_RECIPROCALS[arguments.reciprocal],
        threads=torch.get_num_threads() if x.numel() >= PARALLEL_ELEMENTS else 1,
        two_shot=cpu_is_two_shot(tokens, hidden_size, x.element_size(), arguments.world_size),
    )
    workspace.call(call)
    return results


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _code(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else _DTYPES[tensor.dtype]


def _number(tensor: torch.Tensor | None, number: float) -> float:
    """A scalar's value; reading a CPU tensor costs nothing."""
    return number if tensor is None else float(tensor.item())

"""The fused op: its schema, its fake implementation, its dispatch.

    fx_fusion::all_reduce_add_rms_norm(x, residual, weight, bias, eps, group_name, world_size, ...)
        -> (norm, residual, reduced, rstd)

`arguments.Arguments` documents each argument. With x this rank's partial sum, it equals

    reduced = all_reduce(x, "sum", group)
    h = reduced [.to(add_dtype)] [+ bias] [* scale];    h = residual + h
    s = h.float().pow(2).mean(-1, keepdim=True) + eps
    n = (h.float() * s.rsqrt()) [.to(norm_dtype)] * weight
    norm = n.to(out_dtype or h.dtype);   residual = h;   rstd = s.rsqrt()

with torch's own promotion and rounding at each step. Results are contiguous and never alias
an input or each other; one that isn't wanted is an empty tensor of the dtype it would have
had. The op is functional and total: any layout, any number of tokens, every mix of dtypes.

It raises ValueError for arguments that make no sense, GradientError where autograd would need
a formula, GroupError for a group that doesn't exist, and WorldSizeError for one of another
size than the graph was compiled for.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch

from fx_fusion.errors import GradientError
from fx_fusion.lowering import dispatch
from fx_fusion.lowering.arguments import Arguments, Results, check, result_dtypes
from fx_fusion.lowering.groups import checked_group

NAME: Final = "all_reduce_add_rms_norm"
SCHEMA: Final = (
    f"{NAME}(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps,"
    " str group_name, int world_size, *, Tensor? eps_tensor=None, float scale=1.0,"
    " Tensor? scale_tensor=None, ScalarType? add_dtype=None, ScalarType? norm_dtype=None,"
    ' ScalarType? out_dtype=None, str weight_form="w", str reciprocal="rsqrt",'
    " bool want_norm=True, bool want_residual=False, bool want_reduced=False,"
    ' bool want_rstd=False, bool deterministic=False, str plan="")'
    " -> (Tensor norm, Tensor residual, Tensor reduced, Tensor rstd)"
)

# torch leaves it untyped.
_torch_library: Final = cast(Any, torch.library)


def _run(*args: Any, **kwargs: Any) -> Results:
    """The real implementation, on every device."""
    arguments = Arguments(*args, **kwargs)
    check(arguments)
    group = checked_group(arguments.group_name, arguments.world_size)
    return dispatch.run(arguments, group)


def _fake(*args: Any, **kwargs: Any) -> Results:
    """Empty results of the right shape and dtype; looks at no process group."""
    arguments = Arguments(*args, **kwargs)
    check(arguments)
    x = arguments.x
    norm_dtype, hidden_dtype = result_dtypes(arguments)

    def empty(wanted: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return x.new_empty(shape if wanted else (0,), dtype=dtype)

    return Results(
        empty(arguments.want_norm, norm_dtype, (*x.shape,)),
        empty(arguments.want_residual, hidden_dtype, (*x.shape,)),
        empty(arguments.want_reduced, x.dtype, (*x.shape,)),
        empty(arguments.want_rstd, torch.float32, (*x.shape[:-1], 1)),
    )


def _autograd(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Raise where a gradient would be lost; else go on below autograd."""
    if torch.is_grad_enabled():
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise GradientError(_gradient_message(Arguments(*args, **kwargs)))
    return _op.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)


def _gradient_message(arguments: Arguments) -> str:
    names = [
        name
        for name, value in arguments._asdict().items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    return (
        f"fx_fusion::{NAME} has no gradient formula, and these inputs require one:"
        f" {', '.join(names)}. Write all_reduce, add and norm apart and compile them with"
        ' backend="fx_fusion" (which trains), or call the op under torch.no_grad().'
    )


# FRAGMENT, as other modules add their ops to the same namespace.
_library: Final = _torch_library.Library("fx_fusion", "FRAGMENT")
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_op: Final = torch.ops.fx_fusion.all_reduce_add_rms_norm.default
_library.impl(NAME, _run, "CPU")
_library.impl(NAME, _run, "CUDA")  # HIP's key as well
_library.impl(NAME, _autograd, "Autograd", with_keyset=True)
torch.library.register_fake(f"fx_fusion::{NAME}", _fake, lib=_library)

#: The op as graphs hold it, `torch.ops.fx_fusion.all_reduce_add_rms_norm.default`.
all_reduce_add_rms_norm: Final = _op

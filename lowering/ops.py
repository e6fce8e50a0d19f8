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

Three more ops are for Inductor, which writes the hidden state over a residual that nobody reads any
more (see `inductor`). `..._with_residual` is the same op with a residual that can't be None;
`..._over_residual` writes the hidden state to the residual, whose dtype must be the hidden
state's, and returns that: what a graph holds. `..._in_place` has an empty result there, as
Inductor can't call an op that mutates an argument and returns it.

It raises ValueError for arguments that make no sense, GradientError where autograd would need
a formula, GroupError for a group that doesn't exist, and WorldSizeError for one of another
size than the graph was compiled for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch

from fx_fusion.errors import GradientError
from fx_fusion.lowering import dispatch, in_place
from fx_fusion.lowering.arguments import Arguments, Results, check, result_dtypes
from fx_fusion.lowering.groups import checked_group

NAME: Final = "all_reduce_add_rms_norm"
WITH_RESIDUAL: Final = f"{NAME}_with_residual"
IN_PLACE: Final = f"{NAME}_in_place"
OVER_RESIDUAL: Final = f"{NAME}_over_residual"
SCHEMA: Final = (
    f"{NAME}(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps,"
    " str group_name, int world_size, *, Tensor? eps_tensor=None, float scale=1.0,"
    " Tensor? scale_tensor=None, ScalarType? add_dtype=None, ScalarType? norm_dtype=None,"
    ' ScalarType? out_dtype=None, str weight_form="w", str reciprocal="rsqrt",'
    " bool want_norm=True, bool want_residual=False, bool want_reduced=False,"
    ' bool want_rstd=False, bool deterministic=False, str plan="")'
    " -> (Tensor norm, Tensor residual, Tensor reduced, Tensor rstd)"
)

#: Generated C++ asks this op for the address of what it calls, see `cpp_code`. torch names an op
#: that is missing, so its name is what has to be done then.
NEEDED_IMPORT: Final = "fx_fusion::import_fx_fusion.ops"

#: The results of an op that returns the residual.
_ALIAS: Final = "Tensor(a!) residual, Tensor reduced"
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


def _refuse_gradients(*args: Any, **kwargs: Any) -> None:
    """Raise where a gradient would be lost."""
    if torch.is_grad_enabled():
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise GradientError(_gradient_message(Arguments(*args, **kwargs)))


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


def _run_in_place(*args: Any, **kwargs: Any) -> Results:
    """The real implementation of the op that writes to the residual."""
    arguments = Arguments(*args, **kwargs)
    check(arguments)
    in_place.check(arguments)
    group = checked_group(arguments.group_name, arguments.world_size)
    return in_place.run(arguments, group)


def _fake_in_place(*args: Any, **kwargs: Any) -> Results:
    """As `_fake`, without a result for the hidden state."""
    arguments = Arguments(*args, **kwargs)
    check(arguments)
    in_place.check(arguments)
    return _fake(*arguments._replace(want_residual=False))


def _run_over_residual(*args: Any, **kwargs: Any) -> Results:
    """The same, with the residual as the second result."""
    residual = Arguments(*args, **kwargs).residual
    assert residual is not None
    return _run_in_place(*args, **kwargs)._replace(residual=residual)


def _fake_over_residual(*args: Any, **kwargs: Any) -> Results:
    """As `_fake_in_place`, with the residual as the second result."""
    residual = Arguments(*args, **kwargs).residual
    assert residual is not None
    return _fake_in_place(*args, **kwargs)._replace(residual=residual)


def _note_writes(*args: Any, **kwargs: Any) -> None:
    """Tell autograd that the residual isn't what it was."""
    residual = Arguments(*args, **kwargs).residual
    if residual is not None and not residual.is_inference():
        torch.autograd.graph.increment_version(residual)


# FRAGMENT, as other modules add their ops to the same namespace.
_library: Final = _torch_library.Library("fx_fusion", "FRAGMENT")


def _define(
    schema: str,
    run: Callable[..., Results],
    fake: Callable[..., Results],
    *checks: Callable[..., None],
) -> Any:
    """Define an op, with what it does first where autograd is on; returns its only overload."""
    name: str = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.fx_fusion, name).default

    def autograd(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        for step in checks:
            step(*args, **kwargs)
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")  # HIP's key as well
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"fx_fusion::{name}", fake, lib=_library)
    return op


def _schema(name: str, residual: str) -> str:
    return SCHEMA.replace(NAME, name, 1).replace("Tensor? residual", f"{residual} residual", 1)


def _entry_address() -> int:
    """The address of what generated C++ calls, in this process."""
    from fx_fusion.lowering import cpp_entry

    return cpp_entry.address()


_library.define("import_fx_fusion.ops() -> int")
_library.impl("import_fx_fusion.ops", _entry_address, "CompositeExplicitAutograd")

#: The op as graphs hold it, `torch.ops.fx_fusion.all_reduce_add_rms_norm.default`.
all_reduce_add_rms_norm: Final = _define(SCHEMA, _run, _fake, _refuse_gradients)
#: The same for a site that has a residual.
with_residual: Final = _define(_schema(WITH_RESIDUAL, "Tensor"), _run, _fake, _refuse_gradients)
#: What takes its place in a graph where the residual is read by nobody else.
over_residual: Final = _define(
    _schema(OVER_RESIDUAL, "Tensor(a!)").replace("Tensor residual, Tensor reduced", _ALIAS, 1),
    _run_over_residual,
    _fake_over_residual,
    _refuse_gradients,
    _note_writes,
)
#: What Inductor's code calls for it where it goes through the dispatcher.
into_residual: Final = _define(
    _schema(IN_PLACE, "Tensor(a!)"),
    _run_in_place,
    _fake_in_place,
    _refuse_gradients,
    _note_writes,
)

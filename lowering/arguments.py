"""The fused op's arguments and results as tuples, the check of the arguments, result dtypes.

The op's real and fake implementations share this module, so that they refuse the same
arguments and agree on every result's shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast, get_args

import torch

from fx_fusion.lowering.norm_form import Reciprocal, Weight

#: The dtypes of tensors with a hidden dimension, and of the casts in between.
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_WEIGHT_FORMS: Final = get_args(Weight)
_RECIPROCALS: Final = get_args(Reciprocal)
# torch leaves it untyped.
_check_value: Final = cast(Any, torch)._check_value


#: Bytes to whose multiples the GPU kernels' tensors are aligned.
ALIGNMENT: Final = 16


class Arguments(NamedTuple):
    """The op's arguments, in the order and with the defaults of its schema.

    Attributes:
        x: This rank's partial sum, [..., hidden]; float32, float16 or bfloat16.
        residual: Added to the reduced value; x's shape, any of the three dtypes.
        weight: The norm's weight, [hidden].
        bias: Added to the reduced value before scale and residual, [hidden].
        eps: Added to the mean square.
        group_name: The process group's name.
        world_size: The ranks the group had when the graph was compiled.
        eps_tensor: eps as a 0-d tensor; used in place of `eps`.
        scale: Multiplies the reduced value after the bias; 1.0 for none.
        scale_tensor: scale as a 0-d tensor.
        add_dtype: The reduced value is cast to it before bias, scale and residual.
        norm_dtype: The normalised value is cast to it before the weight; None leaves fp32.
        out_dtype: The norm's dtype; None takes the hidden state's.
        weight_form: "w", "1+w" or "none", see `norm_form.NormForm`.
        reciprocal: "rsqrt", "pow" or "sqrt", see `norm_form.NormForm`.
        want_norm: Return the norm.
        want_residual: Return the hidden state that was normed (the next residual).
        want_reduced: Return the bare sum over ranks.
        want_rstd: Return the reciprocal root, fp32 [..., 1], for a backward pass.
        deterministic: Sum over ranks in fp32 in rank order.
        plan: The digest of what `select` decided.
    """

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    group_name: str
    world_size: int
    eps_tensor: torch.Tensor | None = None
    scale: float = 1.0
    scale_tensor: torch.Tensor | None = None
    add_dtype: torch.dtype | None = None
    norm_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    weight_form: str = "w"
    reciprocal: str = "rsqrt"
    want_norm: bool = True
    want_residual: bool = False
    want_reduced: bool = False
    want_rstd: bool = False
    deterministic: bool = False
    plan: str = ""


class Results(NamedTuple):
    """The op's results; one that wasn't asked for is an empty tensor of its dtype.

    Attributes:
        norm: [..., hidden] of `out_dtype`, or of the hidden state's dtype.
        residual: The hidden state, [..., hidden].
        reduced: The sum over ranks, [..., hidden] of x's dtype.
        rstd: The reciprocal root, float32 [..., 1].
    """

    norm: torch.Tensor
    residual: torch.Tensor
    reduced: torch.Tensor
    rstd: torch.Tensor


def check(arguments: Arguments) -> None:
    """Raise ValueError for arguments that make no sense; sizes may be symbolic.

    A symbolic size is compared through `torch._check_value`, which defers what can't be
    decided to run time and so puts no guard on an unbacked size.
    """
    x = arguments.x
    if x.dim() == 0:
        raise ValueError(
            "x is 0-d; it must have the hidden dimension as its last, [..., hidden]."
        )
    _check_choice("weight_form", arguments.weight_form, _WEIGHT_FORMS)
    _check_choice("reciprocal", arguments.reciprocal, _RECIPROCALS)
    if (arguments.weight is None) != (arguments.weight_form == "none"):
        given = "no weight" if arguments.weight is None else "a weight"
        raise ValueError(
            f"weight_form={arguments.weight_form!r} came with {given}; give"
            ' weight_form="none" without a weight, "w" or "1+w" with one.'
        )
    if arguments.scale_tensor is not None and arguments.scale != 1.0:
        raise ValueError(
            f"scale={arguments.scale} came with a scale_tensor as well; give one of them."
        )
    for name in ("add_dtype", "norm_dtype", "out_dtype"):
        dtype = getattr(arguments, name)
        if dtype is not None:
            _check_dtype(name, dtype)
    _check_dtype("x", x.dtype)
    _check_tensor("residual", arguments.residual, x, x.shape)
    _check_tensor("weight", arguments.weight, x, x.shape[-1:])
    _check_tensor("bias", arguments.bias, x, x.shape[-1:])
    for name in ("eps_tensor", "scale_tensor"):
        scalar: torch.Tensor | None = getattr(arguments, name)
        if scalar is not None and (scalar.dim() or scalar.is_complex()):
            raise ValueError(
                f"{name} has shape {tuple(scalar.shape)} and dtype {scalar.dtype}; it must be a"
                " 0-d tensor of a real dtype."
            )


def _check_choice(name: str, given: str, valid: Sequence[str]) -> None:
    if given not in valid:
        raise ValueError(f"{name}={given!r} is unknown; choose one of {', '.join(valid)}.")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(
            f"{name} is {dtype}; the op takes {', '.join(map(str, DTYPES))}. Cast before it."
        )


def _check_tensor(
    name: str, tensor: torch.Tensor | None, x: torch.Tensor, shape: Sequence[int | torch.SymInt]
) -> None:
    """Raise ValueError unless `tensor` is None or has `shape` and fits x in the rest."""
    if tensor is None:
        return
    _check_dtype(name, tensor.dtype)
    if tensor.device != x.device:
        raise ValueError(
            f"{name} is on {tensor.device} and x on {x.device}; move them to one device."
        )

    def message() -> str:
        return (
            f"{name} has shape {tuple(tensor.shape)}; with x of shape {tuple(x.shape)} it must"
            f" be {tuple(shape)}. Expand it first."
        )

    if tensor.dim() != len(shape):
        raise ValueError(message())
    for given, valid in zip(tensor.shape, shape, strict=True):
        if isinstance(given, int) and isinstance(valid, int):
            if given != valid:
                raise ValueError(message())
        else:
            _check_value(given == valid, message)


def result_dtypes(arguments: Arguments) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of norm and hidden state, by torch's own promotion at each step.

    0-d tensors and floats don't promote a tensor of a floating dtype, so `scale` and `eps`
    have no say.
    """
    hidden = arguments.add_dtype or arguments.x.dtype
    for tensor in (arguments.bias, arguments.residual):
        if tensor is not None:
            hidden = torch.promote_types(hidden, tensor.dtype)
    return arguments.out_dtype or hidden, hidden


def is_aligned(tensor: torch.Tensor | None) -> bool:
    """True if it begins at a multiple of 16 bytes, as the GPU kernels read; True for None."""
    return tensor is None or tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it isn't contiguous or doesn't begin at a multiple of 16 bytes.

    Layout is a local fact, so it may cost a copy but may not choose another path.
    """
    tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else tensor.clone()


def empty_results(arguments: Arguments) -> Results:
    """New tensors for a call's results, those that aren't wanted empty."""
    x = arguments.x
    norm_dtype, hidden_dtype = result_dtypes(arguments)
    shape = x.shape
    return Results(
        x.new_empty(shape if arguments.want_norm else (0,), dtype=norm_dtype),
        x.new_empty(shape if arguments.want_residual else (0,), dtype=hidden_dtype),
        x.new_empty(shape if arguments.want_reduced else (0,)),
        x.new_empty((*shape[:-1], 1) if arguments.want_rstd else (0,), dtype=torch.float32),
    )

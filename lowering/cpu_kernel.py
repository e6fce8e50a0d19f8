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
from typing import Any, Final

import torch

from fx_fusion.lowering.arguments import Arguments, Results, result_dtypes
from fx_fusion.lowering.cpu_workspace import CpuWorkspace
from fx_fusion.lowering.select import cpu_is_two_shot

_DTYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_WEIGHT_FORMS: Final = {"none": 0, "w": 1, "1+w": 2}
_RECIPROCALS: Final = {"rsqrt": 0, "pow": 0, "sqrt": 1, "1/sqrt": 0}

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
#: `Form` of the kernel's source, then how to run it.
_INTEGERS: Final = (
    "has_bias",
    "has_scale",
    "has_residual",
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


class BoundCall:
    """A call of the kernel whose constants are filled in; called with the tensors of a site.

    Dtypes and hidden size are taken from the arguments it is made with; the number of tokens
    may differ from call to call.
    """

    def __init__(self, arguments: Arguments, workspace: CpuWorkspace) -> None:
        """Fill in what doesn't change."""
        self._workspace = workspace
        self._world_size = arguments.world_size
        self._hidden_size = int(arguments.x.shape[-1])
        self._element_size = arguments.x.element_size()
        self._tokens = -1
        self._eps, self._scale = arguments.eps, arguments.scale
        norm_dtype, hidden_dtype = result_dtypes(arguments)
        self._norm_dtype = norm_dtype if arguments.want_norm else None
        self._hidden_dtype = hidden_dtype if arguments.want_residual else None
        self._reduced_dtype = arguments.x.dtype if arguments.want_reduced else None
        self._wants_rstd = arguments.want_rstd
        self._empty = (
            arguments.x.new_empty(0, dtype=norm_dtype),
            arguments.x.new_empty(0, dtype=hidden_dtype),
            arguments.x.new_empty(0),
            arguments.x.new_empty(0, dtype=torch.float32),
        )
        self._call = _Call(hidden=self._hidden_size, **_codes(arguments))

    @property
    def usable(self) -> bool:
        """False once the workspace is closed."""
        return self._workspace.usable

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps_tensor: torch.Tensor | None,
        scale_tensor: torch.Tensor | None,
        results: Results | None = None,
    ) -> Results:
        """Run one site over the group's shared memory.

        `results`: where to write, contiguous, the residual's own memory among it if need be;
        None for new tensors.
        """
        if results is None:
            results = self._outputs(x)
        # reading a 0-d CPU tensor costs nothing
        eps = None if eps_tensor is None else float(eps_tensor.item())
        scale = None if scale_tensor is None else float(scale_tensor.item())
        self.run_into(eps, scale, x, residual, weight, bias, *results)
        return results

    def run_into(
        self,
        eps: float | None,
        scale: float | None,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        hidden: torch.Tensor | None,
        reduced: torch.Tensor | None,
        rstd: torch.Tensor | None,
    ) -> None:
        """Run one site into given results, contiguous; what isn't wanted is not looked at.

        None for eps or scale stands for the number that the call was bound with.
        """
        call = self._call
        x, call.x = _readable(x)
        residual, call.residual = _readable(residual)
        weight, call.weight = _readable(weight)
        bias, call.bias = _readable(bias)
        call.norm = _address(norm, self._norm_dtype)
        call.residual_out = _address(hidden, self._hidden_dtype)
        call.reduced = _address(reduced, self._reduced_dtype)
        call.rstd = _address(rstd, self._wants_rstd)
        call.eps = self._eps if eps is None else eps
        call.scale = self._scale if scale is None else scale
        call.has_scale = call.scale != 1.0
        elements = x.numel()
        if elements != self._tokens * self._hidden_size:
            self._set_tokens(elements // self._hidden_size)
        self._workspace.call(call)

    def _outputs(self, x: torch.Tensor) -> Results:
        """New contiguous tensors for the results of a call."""
        shape = x.shape
        rstd_dtype = torch.float32 if self._wants_rstd else None
        return Results(
            self._output(x, shape, self._norm_dtype, 0),
            self._output(x, shape, self._hidden_dtype, 1),
            self._output(x, shape, self._reduced_dtype, 2),
            self._output(x, (*shape[:-1], 1), rstd_dtype, 3),
        )

    def _output(
        self,
        x: torch.Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        index: int,
    ) -> torch.Tensor:
        """A new result, or where it isn't wanted an empty one that all calls share."""
        return self._empty[index] if dtype is None else x.new_empty(shape, dtype=dtype)

    def _set_tokens(self, tokens: int) -> None:
        self._tokens = tokens
        self._call.tokens = tokens
        parallel = tokens * self._hidden_size >= PARALLEL_ELEMENTS
        most = min(torch.get_num_threads(), self._workspace.threads)
        self._call.threads = most if parallel else 1
        self._call.two_shot = cpu_is_two_shot(
            tokens, self._hidden_size, self._element_size, self._world_size
        )


def run(
    arguments: Arguments, workspace: CpuWorkspace, results: Results | None = None
) -> Results:
    """Run one site from the op's arguments; see `BoundCall.run`."""
    return BoundCall(arguments, workspace).run(
        arguments.x,
        arguments.residual,
        arguments.weight,
        arguments.bias,
        arguments.eps_tensor,
        arguments.scale_tensor,
        results,
    )


def _codes(arguments: Arguments) -> dict[str, int]:
    """The dtypes and forms of a call as the kernel's numbers, step by step."""
    cast = arguments.add_dtype or arguments.x.dtype
    bias, weight = arguments.bias, arguments.weight
    with_bias = cast if bias is None else torch.promote_types(cast, bias.dtype)
    before_weight = arguments.norm_dtype or torch.float32
    product = before_weight
    if weight is not None:
        factor = torch.float32 if arguments.weight_form == "1+w" else weight.dtype
        product = torch.promote_types(before_weight, factor)
    norm_dtype, hidden_dtype = result_dtypes(arguments)
    return {
        "has_bias": int(bias is not None),
        "has_residual": int(arguments.residual is not None),
        "x_dtype": _DTYPES[arguments.x.dtype],
        "residual_dtype": _code(arguments.residual),
        "weight_dtype": _code(weight),
        "bias_dtype": _code(bias),
        "cast_dtype": _DTYPES[cast],
        "bias_out_dtype": _DTYPES[with_bias],
        "hidden_dtype": _DTYPES[hidden_dtype],
        "norm_dtype": _DTYPES[before_weight],
        "product_dtype": _DTYPES[product],
        "out_dtype": _DTYPES[norm_dtype],
        "weight_form": _WEIGHT_FORMS[arguments.weight_form],
        "reciprocal": _RECIPROCALS[arguments.reciprocal],
    }


def _readable(tensor: Any) -> tuple[Any, int | None]:
    """The tensor as contiguous memory and its address; None for None."""
    if tensor is None:
        return None, None
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor, tensor.data_ptr()


def _address(result: torch.Tensor | None, wanted: object) -> int | None:
    """Where a result goes, None for one that isn't wanted."""
    return result.data_ptr() if wanted and result is not None else None


def _code(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else _DTYPES[tensor.dtype]

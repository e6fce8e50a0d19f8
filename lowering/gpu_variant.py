"""The kernel's compile-time options: from the op's arguments to the macros of the source."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from fx_fusion.lowering.arguments import Arguments, result_dtypes
from fx_fusion.lowering.gpu_layout import VECTOR_BYTES, Geometry

#: `Dtype` of the kernel.
DTYPE_CODES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ABSENT: Final = -1


class Variant(NamedTuple):
    """One compiled kernel; each field but the first is a macro of its name in capitals.

    Attributes:
        algorithm: Which kernel, a key of `gpu_build.KERNELS`.
    """

    algorithm: str
    world: int
    cluster: int
    threads: int
    blocks: int
    vectors_per_thread: int
    aligned: int
    x_dtype: int
    residual_dtype: int
    bias_dtype: int
    weight_dtype: int
    cast_dtype: int
    bias_out_dtype: int
    hidden_dtype: int
    norm_dtype: int
    product_dtype: int
    out_dtype: int
    one_plus_weight: int
    divide_by_root: int
    has_scale: int
    want_norm: int
    want_residual: int
    want_reduced: int
    want_rstd: int

    def macros(self) -> tuple[str, ...]:
        """The options as the compiler takes them."""
        return tuple(f"-D{name.upper()}={value}" for name, value in self.options().items())

    def options(self) -> dict[str, int]:
        """The macros' values, by field."""
        options = self._asdict()
        del options["algorithm"]
        return options


def has_scale(arguments: Arguments) -> bool:
    """True if the reduced value is multiplied."""
    return arguments.scale_tensor is not None or arguments.scale != 1.0


def bias_out_dtype(arguments: Arguments) -> torch.dtype:
    """The dtype after the bias and the scale, by torch's promotion."""
    dtype = arguments.add_dtype or arguments.x.dtype
    if arguments.bias is None:
        return dtype
    return torch.promote_types(dtype, arguments.bias.dtype)


def variant_of(
    arguments: Arguments, geometry: Geometry, algorithm: str = "one-shot"
) -> Variant:
    """The kernel that computes these arguments by an algorithm, a key of `gpu_build.KERNELS`."""
    x, weight = arguments.x, arguments.weight
    norm_dtype, hidden_dtype = result_dtypes(arguments)
    before_weight = arguments.norm_dtype or torch.float32
    product = before_weight
    if weight is not None:
        factor = torch.float32 if arguments.weight_form == "1+w" else weight.dtype
        product = torch.promote_types(before_weight, factor)
    return Variant(
        algorithm=algorithm,
        world=arguments.world_size,
        cluster=geometry.cluster,
        threads=geometry.threads,
        blocks=geometry.blocks,
        vectors_per_thread=geometry.vectors,
        aligned=int(x.shape[-1] * x.element_size() % VECTOR_BYTES == 0),
        x_dtype=DTYPE_CODES[x.dtype],
        residual_dtype=_code(arguments.residual),
        bias_dtype=_code(arguments.bias),
        weight_dtype=_code(weight),
        cast_dtype=DTYPE_CODES[arguments.add_dtype or x.dtype],
        bias_out_dtype=DTYPE_CODES[bias_out_dtype(arguments)],
        hidden_dtype=DTYPE_CODES[hidden_dtype],
        norm_dtype=DTYPE_CODES[before_weight],
        product_dtype=DTYPE_CODES[product],
        out_dtype=DTYPE_CODES[norm_dtype],
        one_plus_weight=int(arguments.weight_form == "1+w"),
        divide_by_root=int(arguments.reciprocal == "sqrt"),
        has_scale=int(has_scale(arguments)),
        want_norm=int(arguments.want_norm),
        want_residual=int(arguments.want_residual),
        want_reduced=int(arguments.want_reduced),
        want_rstd=int(arguments.want_rstd),
    )


def _code(tensor: torch.Tensor | None) -> int:
    return _ABSENT if tensor is None else DTYPE_CODES[tensor.dtype]

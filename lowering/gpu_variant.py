"""The kernel's compile-time options: from the op's arguments to the macros of the source."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from fx_fusion.lowering.arguments import Arguments, result_dtypes
from fx_fusion.lowering.gpu_layout import VECTOR_BYTES, Geometry, geometry

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


def is_plain(arguments: Arguments) -> bool:
    """True for the usual site: 16-bit residual and weight at most, and nothing else to keep."""
    tensors = (arguments.x, arguments.residual, arguments.weight)
    return (
        all(value is None or value.dtype.itemsize == 2 for value in tensors)
        and arguments.bias is None
        and not has_scale(arguments)
        and not arguments.want_reduced
        and not arguments.want_rstd
        and arguments.reciprocal != "sqrt"
    )


def spread_of(
    arguments: Arguments,
    rows: int,
    multiprocessors: int,
    has_clusters: bool,
    algorithm: str = "one-shot",
) -> Geometry:
    """How each row of a launch is spread over the GPU; arguments as in `gpu_layout.geometry`."""
    x = arguments.x
    return geometry(
        x.shape[-1],
        x.element_size(),
        1 if algorithm == "local" else arguments.world_size,
        rows,
        multiprocessors,
        has_clusters,
        is_plain(arguments),
    )


def bias_out_dtype(arguments: Arguments) -> torch.dtype:
    """The dtype after the bias and the scale, by torch's promotion."""
    dtype = arguments.add_dtype or arguments.x.dtype
    if arguments.bias is None:
        return dtype
    return torch.promote_types(dtype, arguments.bias.dtype)


def variant_of(arguments: Arguments, spread: Geometry, algorithm: str = "one-shot") -> Variant:
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
        cluster=spread.cluster,
        threads=spread.threads,
        blocks=spread.blocks,
        vectors_per_thread=spread.vectors,
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

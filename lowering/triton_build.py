"""From the op's arguments to the Triton kernel's compile-time constants and launch options.

Also compiles a variant for another machine's GPU, which needs none here. Triton is imported only
when a kernel is asked for, and caches its binaries on disk itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
from pathlib import Path
from typing import Any, Final

import torch

from fx_fusion.lowering.arguments import Arguments, result_dtypes
from fx_fusion.lowering.gpu_variant import bias_out_dtype, has_scale
from fx_fusion.lowering.triton_layout import (
    block_of,
    layout,
    parts_at_once,
    region_of,
    warps_of,
)

#: The oldest Triton whose compiler takes the kernel; torch 2.11 comes with it.
MIN_VERSION: Final = (3, 6)
_KERNEL_MODULE: Final = "fx_fusion.lowering.triton_one_shot"
_NAMES: Final = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class TritonError(RuntimeError):
    """Triton isn't installed, is too old, or can't compile the kernel."""


@functools.cache
def triton_version() -> str:
    """The installed Triton's version.

    Raises:
        TritonError: There is none, or it is older than 3.6.
    """
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise TritonError("Triton isn't installed") from None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise TritonError(f"Triton {version} is installed; the kernel needs 3.6 or newer")
    return version


@functools.cache
def kernels() -> Any:
    """The module that holds the kernels.

    Raises:
        TritonError: Triton can't be imported.
    """
    triton_version()
    try:
        return importlib.import_module(_KERNEL_MODULE)
    except Exception as error:  # whatever a broken installation raises
        raise TritonError(f"Triton can't be imported: {error}") from error


def machine_of(arch: str) -> int:
    """Which clock the kernel reads on an arch such as "sm_90" or "gfx942"."""
    module = kernels()
    return int(module.NVIDIA if arch.startswith("sm_") else module.AMD)


def try_out(device: torch.device) -> None:
    """Compile and run the smallest kernel: Triton needs a C compiler for its own launcher.

    Raises:
        TritonError: That fails, with the first line of what Triton says.
    """
    module = kernels()
    try:
        answer = torch.zeros(1, dtype=torch.int32, device=device)
        module.probe[(1,)](answer)
        works = int(answer.item()) == 1
    except Exception as error:  # errors of its compilers, of subprocesses, of the driver
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = lines[0] if lines else type(error).__name__
        raise TritonError(f"Triton {triton_version()} doesn't work here: {text}") from error
    if not works:
        raise TritonError(f"a kernel of Triton {triton_version()} gave a wrong result")


@functools.cache
def source_hash() -> str:
    """Twelve hex digits over the kernel's source; ranks have to agree on it."""
    source = Path(__file__).with_name("triton_one_shot.py").read_bytes()
    return hashlib.sha256(source).hexdigest()[:12]


def steps_of(arguments: Arguments) -> dict[str, Any]:
    """The constants that say which steps follow the sum, and how each rounds."""
    weight = arguments.weight
    out_dtype, hidden_dtype = result_dtypes(arguments)
    norm_dtype = product = arguments.norm_dtype or torch.float32
    if weight is not None:
        factor = torch.float32 if arguments.weight_form == "1+w" else weight.dtype
        product = torch.promote_types(norm_dtype, factor)
    hidden_size = arguments.x.shape[-1]
    dtypes = {
        "X": arguments.x.dtype,
        "CAST": arguments.add_dtype or arguments.x.dtype,
        "BIASED": bias_out_dtype(arguments),
        "SUM": hidden_dtype,
        "NORM": norm_dtype,
        "PRODUCT": product,
        "OUT": out_dtype,
    }
    return {
        "HIDDEN": hidden_size,
        "BLOCK": block_of(hidden_size),
        **{name: _triton_dtype(dtype) for name, dtype in dtypes.items()},
        "SCALED": has_scale(arguments),
        "ONE_PLUS": arguments.weight_form == "1+w",
        "DIVIDE": arguments.reciprocal == "sqrt",
    }


def exchange_of(arguments: Arguments, machine: int) -> dict[str, Any]:
    """The constants of the exchange; `machine` is which clock and polls there are."""
    x, size = arguments.x, arguments.world_size
    region = region_of(x.shape[-1], x.element_size(), size)
    return {
        "WORLD": size,
        "AT_ONCE": min(size, parts_at_once(x.shape[-1])),
        "DATA": region.data,
        "FLAGS": region.flags,
        "STATES": region.states,
        "CONTROL": layout(size).control,
        "RING_ROWS": region.rows,
        "ROW_BYTES": region.row_bytes,
        "MACHINE": machine,
    }


def launch_options(hidden_size: int) -> dict[str, Any]:
    """Triton's own options. Contraction into fused multiply-adds would change the roundings."""
    return {"num_warps": warps_of(hidden_size), "num_stages": 1, "enable_fp_fusion": False}


def compile_for(arguments: Arguments, arch: str) -> Any:
    """Compile the kernel of a call for an arch such as "sm_90" or "gfx942".

    Returns:
        Triton's compiled kernel: `asm` holds its stages, "cubin" or "hsaco" among them.

    Raises:
        TritonError: Triton can't be used.
    """
    module = kernels()
    compiler = importlib.import_module("triton.compiler")
    targets = importlib.import_module("triton.backends.compiler")
    if arch.startswith("sm_"):
        target = targets.GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    else:
        target = targets.GPUTarget("hip", arch, 64)
    constants = {**steps_of(arguments), **exchange_of(arguments, machine_of(arch))}
    signature = dict.fromkeys(constants, "constexpr")
    pointers = {
        "x": arguments.x.dtype,
        "residual": _dtype_of(arguments.residual),
        "weight": _dtype_of(arguments.weight),
        "bias": _dtype_of(arguments.bias),
        "eps_tensor": _dtype_of(arguments.eps_tensor),
        "scale_tensor": _dtype_of(arguments.scale_tensor),
        "norm": result_dtypes(arguments)[0] if arguments.want_norm else None,
        "residual_out": result_dtypes(arguments)[1] if arguments.want_residual else None,
        "reduced": arguments.x.dtype if arguments.want_reduced else None,
        "rstd": torch.float32 if arguments.want_rstd else None,
    }
    for name, dtype in pointers.items():
        signature[name] = "constexpr" if dtype is None else f"*{_NAMES[dtype]}"
        if dtype is None:
            constants[name] = None
    signature.update(table="*i64", first="i32", rows="i32", eps="fp32", scale="fp32")
    names = module.one_shot.arg_names
    aligned = [name for name, dtype in pointers.items() if dtype is not None]
    source = compiler.ASTSource(
        fn=module.one_shot,
        signature={name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return compiler.compile(
        source, target=target, options=launch_options(arguments.x.shape[-1])
    )


def _dtype_of(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(
        importlib.import_module("triton.language"), str(dtype).removeprefix("torch.")
    )

"""Registers and stack of the Triton kernel's variants, from the machine code.

Writes `triton_registers.csv`, the table that is committed (by Triton 3.6), in some minutes:

    python tests/lowering/gpu/triton_registers.py
"""

from __future__ import annotations

import csv
import itertools
import re
import struct
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from fx_fusion.lowering import triton_build
from fx_fusion.lowering.arguments import Arguments

TABLE: Final = Path(__file__).with_name("triton_registers.csv")
NVIDIA: Final = ("sm_80", "sm_90", "sm_100")
AMD: Final = ("gfx942", "gfx950")
#: Attributes in a cubin's `.nv.info`: registers, bytes of a thread's stack.
_REGISTERS: Final = 0x2F
_FRAME: Final = 0x11


class Use(NamedTuple):
    """What a thread takes: registers, and memory where they didn't suffice."""

    registers: int
    spilled: int


def triton_is_missing() -> str:
    """Why Triton can't be used here, "" if it can."""
    try:
        triton_build.triton_version()
    except triton_build.TritonError as error:
        return str(error)
    return ""


def site(
    hidden: int, dtype: torch.dtype, world: int, options: str = "usual", **more: Any
) -> Arguments:
    """A call: "usual" has a residual and a weight of x's dtype, "all" whatever takes registers."""
    x = torch.empty(1, hidden, dtype=dtype)
    if options == "usual":
        return Arguments(x, x, x[0], None, 1e-6, "", world, want_residual=True, **more)
    other = x.float()
    return Arguments(
        *(x, other, other[0], other[0], 1e-6, "", world),
        reciprocal="sqrt",
        want_residual=True,
        want_reduced=True,
        want_rstd=True,
        **more,
    )


def use_of(kernel: Any) -> Use:
    """Read it from what Triton compiled."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        numbers = {
            name: int(re.search(rf"\.{name}:\s*(\d+)", text)[1])  # type: ignore[index]
            for name in ("vgpr_count", "vgpr_spill_count")
        }
        return Use(numbers["vgpr_count"], numbers["vgpr_spill_count"])
    found = _attributes(kernel.asm["cubin"])
    registers, stack = (
        max(value for attribute, value in found if attribute == wanted)
        for wanted in (_REGISTERS, _FRAME)
    )
    return Use(registers, stack)


def _attributes(cubin: bytes) -> list[tuple[int, int]]:
    """(attribute, value) of the entries in `.nv.info` that have a symbol and a value."""
    offset, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 40)
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + n * size) for n in range(count)]
    found = []
    for name, _, _, _, start, length in sections:
        label = cubin[sections[names][4] + name :].split(b"\0", 1)[0]
        if label != b".nv.info":
            continue
        at = start
        while at < start + length:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 4:  # `value` bytes follow: a symbol, then what it has
                if value == 8:
                    found.append((attribute, struct.unpack_from("<II", cubin, at)[1]))
                at += value
    return found


def main() -> int:
    """Write the table."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("arch", "world", "dtype", "options", "hidden", *Use._fields))
        for arch, world, dtype, options, hidden in itertools.product(
            NVIDIA + AMD,
            (2, 8, 16),
            (torch.bfloat16, torch.float32),
            ("usual", "all"),
            (4096, 8192, 16384),
        ):
            kernel = triton_build.compile_for(site(hidden, dtype, world, options), arch)
            name = str(dtype).removeprefix("torch.")
            writer.writerow((arch, world, name, options, hidden, *use_of(kernel)))
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

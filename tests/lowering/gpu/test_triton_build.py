"""The Triton kernel compiles for every NVIDIA and AMD target, on a machine without a GPU."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from op_support import BF16, FP16, FP32
from triton_registers import AMD, NVIDIA, site, triton_is_missing, use_of

from fx_fusion.lowering import triton_build
from fx_fusion.lowering.gpu_layout import MAX_HIDDEN_SIZE
from fx_fusion.lowering.triton_layout import (
    CONTROL_BYTES,
    ROW_BYTES,
    SLOTS,
    block_of,
    layout,
    region_of,
    warps_of,
)

needs_triton = pytest.mark.skipif(triton_is_missing() != "", reason=triton_is_missing())
#: Bytes of a thread's stack that the assembler may take beside its registers.
MOST_SPILLED = 32
MEBIBYTE = 1 << 20


@needs_triton
@pytest.mark.parametrize("arch", NVIDIA)
def test_it_compiles_for_nvidia(arch: str) -> None:
    kernel = triton_build.compile_for(site(8192, BF16, 8), arch)
    assert kernel.asm["cubin"].startswith(b"\x7fELF")
    assert use_of(kernel).spilled <= MOST_SPILLED
    text = kernel.asm["ptx"]
    assert "fma.rn.f32" not in text  # a contraction would change the roundings
    assert ".nc." not in text
    assert "ld.global.cg.v4" in text
    for order in ("sys.release.exch", "sys.acquire.max"):
        assert f"atom.global.{order}" in text


@needs_triton
@pytest.mark.parametrize("arch", AMD)
def test_it_compiles_for_amd(arch: str) -> None:
    kernel = triton_build.compile_for(site(8192, BF16, 8), arch)
    assert kernel.asm["hsaco"].startswith(b"\x7fELF")
    assert use_of(kernel).spilled == 0
    text = kernel.asm["amdgcn"]
    # what peers write is read and written around this GPU's caches
    assert re.search(r"_store_dwordx\d .* sc0 sc1", text)
    assert re.search(r"_load_dwordx\d .* sc0 sc1", text)
    assert "buffer_wbl2 sc0 sc1" in text
    assert "buffer_inv sc0 sc1" in text
    assert "s_memrealtime" in text
    # the root and the division take ten; a contracted sum would take one for each element
    assert len(re.findall(r"v_(?:pk_)?fmac?_f32", text)) <= 12


@needs_triton
@pytest.mark.parametrize(
    ("hidden", "dtype", "world", "options"),
    [(63, FP16, 3, "all"), (2880, FP32, 2, "usual"), (16384, FP32, 16, "all")],
)
def test_odd_sizes_and_all_options_compile(
    hidden: int, dtype: torch.dtype, world: int, options: str
) -> None:
    call = site(hidden, dtype, world, options, weight_form="1+w", scale=0.5)
    assert triton_build.compile_for(call, "sm_90").asm["cubin"]


def test_sizes_of_the_memory_are_as_documented() -> None:
    sizes = {world: layout(world).total / MEBIBYTE for world in range(2, 17)}
    rings = {world: SLOTS * (world - 1) * len(ROW_BYTES) for world in sizes}
    for world, size in sizes.items():
        ring = rings[world] * (2 if world <= 4 else 1 if world <= 8 else 0.5)
        assert ring < size < ring + 0.25
        assert size < 896 / 8  # an eighth of what FlashInfer takes at 8 ranks


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
def test_regions_of_the_memory_do_not_overlap(world: int) -> None:
    extents = []
    for region in layout(world).regions.values():
        extents += [
            (region.data, SLOTS * (world - 1) * region.rows * region.row_bytes),
            (region.flags, SLOTS * region.rows * 64),
            (region.states, region.rows * 4),
        ]
    extents.append((layout(world).control, CONTROL_BYTES))
    extents.sort()
    assert all(start + size <= after for (start, size), (after, _) in pairwise(extents))
    assert sum(extents[-1]) == layout(world).total


def test_every_row_fits_its_place_and_its_tile() -> None:
    for hidden in (*range(1, 600), 2880, 4095, 4097, 7168, MAX_HIDDEN_SIZE):
        block = block_of(hidden)
        assert hidden <= block
        assert block & (block - 1) == 0
        assert warps_of(hidden) * 32 <= block
        for width in (2, 4):
            assert block * width <= region_of(hidden, width, 2).row_bytes

"""The GPU kernels compile as HIP for AMD's GPUs, with the memory operations the protocol needs.

What peers read or write has to bypass this GPU's caches, which is bits of the instructions that
the compiler picks for system scope: `sc0 sc1` on gfx942. gfx90a has `glc` for loads; its stores
have no bit, for what they bypass is a matter of the memory's type.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_registers import variant_for

from fx_fusion.lowering import gpu_build
from fx_fusion.lowering.gpu_variant import Variant

CLANG = "clang++-19"
WORLD = 8
ARCHS = ("gfx90a", "gfx942", "gfx950")
SYSTEM_STORE = re.compile(
    r"__hip_atomic_store\((\w[^,;]*), ([^;]*), __ATOMIC_RELAXED,\s+__HIP_MEMORY_SCOPE_SYSTEM\);"
)
BITS = {"gfx90a": "glc", "gfx942": "sc0 sc1", "gfx950": "sc0 sc1"}

pytestmark = pytest.mark.skipif(shutil.which(CLANG) is None, reason=f"there is no {CLANG}")


@functools.cache
def knows(arch: str) -> bool:
    """True if this clang compiles for the arch; clang 19 doesn't know gfx950."""
    command = [CLANG, f"--offload-arch={arch}", "-x", "hip", "-nogpuinc", "-nogpulib"]
    command += ["--offload-device-only", "-fsyntax-only", "-"]
    return subprocess.run(command, input="", text=True, capture_output=True).returncode == 0


def assembly(variant: Variant, arch: str, folder: Path, push: str = "") -> str:
    """The assembly of a variant; `push` is put in place of how a word is stored for peers."""
    if not knows(arch):
        pytest.skip(f"{CLANG} doesn't know {arch}")
    for name, text in gpu_build.sources().items():
        if push and name == "gpu_device.h":
            text = SYSTEM_STORE.sub(push, text)
        (folder / name).write_text(text)
    target = folder / "kernel.s"
    done = subprocess.run(
        [
            *(CLANG, "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output"),
            *("-nogpuinc", "-nogpulib", "-S", "-o", str(target)),
            *gpu_build.options_of(variant, arch),
            str(folder / gpu_build.KERNELS[variant.algorithm].source),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return target.read_text()


def instructions(text: str, kind: str) -> list[str]:
    """The lines of one instruction."""
    return re.findall(rf"^\s+{kind}\s.*$", text, re.MULTILINE)


def usual(algorithm: str, dtype: torch.dtype = torch.bfloat16, hidden: int = 4096) -> Variant:
    """A usual site's variant for a GPU without clusters, of many rows."""
    return variant_for(algorithm, "sm_80", WORLD, dtype, "usual", hidden, 512)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("algorithm", gpu_build.KERNELS)
def test_what_peers_share_bypasses_the_caches(
    algorithm: str, arch: str, tmp_path: Path
) -> None:
    text = assembly(usual(algorithm), arch, tmp_path)
    bits = BITS[arch]
    polls = [line for line in instructions(text, "global_load_dwordx2") if bits in line]
    if algorithm == "local":
        assert polls == []
        return
    # Elements are polled in halves of 8 bytes, each again while it is missing.
    assert len(polls) >= 2 * 2 * (WORLD - 1)
    if bits == "glc":
        return
    # Results are stored 16 bytes at a time, so what is narrower is for peers: pushes and wipes
    # of 8 bytes, the control words of 4.
    for kind, least in (
        ("global_store_dwordx2", 2 * 2 * (WORLD - 1)),
        ("global_store_dword", 1),
    ):
        stores = instructions(text, kind)
        assert len(stores) >= least
        assert [line for line in stores if bits not in line] == []


@pytest.mark.parametrize("store", [r"*(\1) = (\2);", r"__builtin_nontemporal_store(\2, \1);"])
def test_other_stores_would_be_seen(store: str, tmp_path: Path) -> None:
    text = assembly(usual("one-shot"), "gfx942", tmp_path, store)
    stores = instructions(text, "global_store_dwordx[24]")
    assert [line for line in stores if "sc0 sc1" in line] == []


@pytest.mark.parametrize("algorithm", gpu_build.KERNELS)
@pytest.mark.parametrize(
    ("dtype", "hidden"), [(torch.bfloat16, 63), (torch.float32, 4096)], ids=str
)
def test_nothing_spills(
    algorithm: str, dtype: torch.dtype, hidden: int, tmp_path: Path
) -> None:
    text = assembly(usual(algorithm, dtype, hidden), "gfx942", tmp_path)
    for name in ("vgpr_spill_count", "private_segment_fixed_size"):
        assert set(re.findall(rf"\.{name}:\s+(\d+)", text)) == {"0"}, name

"""The GPU kernel compiles for every NVIDIA and AMD target, on a machine without a GPU."""

from __future__ import annotations

import importlib.resources
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from op_support import BF16, FP16, FP32

from fx_fusion.lowering import gpu_build
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.gpu_build import BuildError
from fx_fusion.lowering.gpu_layout import geometry
from fx_fusion.lowering.gpu_variant import Variant, variant_of

CLANG = "clang++-19"
DTYPES = (BF16, FP16, FP32)


def nvrtc_is_missing() -> str:
    """Why NVRTC can't be used here, "" if it can."""
    try:
        gpu_build.nvrtc_version()
    except BuildError as error:
        return str(error)
    return ""


needs_nvrtc = pytest.mark.skipif(nvrtc_is_missing() != "", reason=nvrtc_is_missing())
needs_clang = pytest.mark.skipif(shutil.which(CLANG) is None, reason=f"there is no {CLANG}")


def variant(
    hidden: int = 4096,
    dtype: torch.dtype = BF16,
    world: int = 2,
    tokens: int = 1,
    clusters: bool = True,
    **options: object,
) -> Variant:
    """A site with a residual and a weight of x's dtype."""
    x = torch.empty(1, hidden, dtype=dtype)
    given = {"want_residual": True, **options}
    arguments = Arguments(x, x, x[0], None, 1e-6, "", world, **given)  # type: ignore[arg-type]
    shape = geometry(hidden, dtype.itemsize, world, tokens, 132, clusters)
    return variant_of(arguments, shape)


def all_options() -> list[Variant]:
    """Each option once, and each pair of dtypes of x and residual."""
    base = variant(hidden=520)
    changed = [base]
    for name, values in {
        "aligned": (0,),
        "residual_dtype": (-1,),
        "bias_dtype": (0, 1, 2),
        "weight_dtype": (-1, 0, 1),
        "cast_dtype": (0, 1),
        "hidden_dtype": (0,),
        "norm_dtype": (1, 2),
        "product_dtype": (2,),
        "out_dtype": (0, 1),
        "one_plus_weight": (1,),
        "divide_by_root": (1,),
        "has_scale": (1,),
        "want_norm": (0,),
        "want_residual": (0,),
        "want_reduced": (1,),
        "want_rstd": (1,),
        "vectors_per_thread": (2,),
    }.items():
        changed += [base._replace(**{name: value}) for value in values]  # type: ignore[arg-type]
    for x, residual, aligned in itertools.product(range(3), range(3), (0, 1)):
        changed.append(base._replace(x_dtype=x, residual_dtype=residual, aligned=aligned))
    return changed


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "world"),
    [
        *(("sm_80", 2), ("sm_80", 8), ("sm_100", 2), ("sm_100", 8)),
        *(("sm_90", 2), ("sm_90", 3), ("sm_90", 8), ("sm_90", 16)),
    ],
)
def test_every_spread_compiles_with_nvrtc(arch: str, world: int) -> None:
    clusters = arch != "sm_80"
    for hidden, dtype, tokens in itertools.product((2880, 16384), (BF16, FP32), (1, 512)):
        chosen = variant(hidden, dtype, world, tokens, clusters)
        options = (f"--gpu-architecture={arch}", *gpu_build._OPTIONS, *chosen.macros())
        code = gpu_build.compile_with_nvrtc(options, chosen.algorithm)
        assert code.startswith(b"\x7fELF")


@needs_nvrtc
def test_every_option_compiles_with_nvrtc() -> None:
    for chosen in all_options():
        options = ("--gpu-architecture=sm_90", *gpu_build._OPTIONS, *chosen.macros())
        code = gpu_build.compile_with_nvrtc(options, chosen.algorithm)
        assert code.startswith(b"\x7fELF")


@needs_nvrtc
def test_machine_code_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_build, "cache_folder", lambda: tmp_path)
    code = gpu_build.machine_code(variant(), "sm_90")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [code]
    monkeypatch.setattr(gpu_build, "compile_with_nvrtc", None)
    assert gpu_build.machine_code(variant(), "sm_90") == code


@needs_nvrtc
def test_an_error_of_the_compiler_is_shown() -> None:
    with pytest.raises(BuildError, match="WORLD"):
        gpu_build.compile_with_nvrtc(("--gpu-architecture=sm_90",), "one-shot")


@needs_clang
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_source_compiles_as_hip(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    text = hip_assembly(variant(2880, dtype, 8, clusters=False), arch, tmp_path)
    assert "vgpr_spill_count: 0" in text
    if arch == "gfx942":  # what peers write is read and written around this GPU's caches
        stores = [line for line in text.splitlines() if "global_store_dwordx2" in line]
        polls = [line for line in text.splitlines() if "global_load_dwordx2" in line]
        assert sum("sc0 sc1" in line for line in polls) >= 2 * 7
        assert sum("sc0 sc1" in line for line in stores) >= 2 * 2 * 7


def hip_assembly(chosen: Variant, arch: str, folder: Path) -> str:
    """The assembly of a variant for an AMD GPU."""
    target = folder / "kernel.s"
    csrc = importlib.resources.files("fx_fusion.lowering") / "csrc"
    with importlib.resources.as_file(csrc / "gpu_one_shot.cu") as source:
        done = subprocess.run(
            [
                *(CLANG, "-x", "hip", f"--offload-arch={arch}", "--offload-device-only"),
                *("--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-O3", "-std=c++17"),
                *("-ffp-contract=off", "-S", str(source), "-o", str(target)),
                *chosen.macros(),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return target.read_text()

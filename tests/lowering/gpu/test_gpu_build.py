"""The GPU kernel compiles for NVIDIA's GPUs, on a machine without a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from op_support import BF16, FP16, FP32

from fx_fusion.lowering import gpu_build
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.gpu_layout import geometry
from fx_fusion.lowering.gpu_variant import Variant, variant_of
from fx_fusion.lowering.runtime_compiler import NVRTC, BuildError

DTYPES = (BF16, FP16, FP32)


def nvrtc_is_missing() -> str:
    """Why NVRTC can't be used here, "" if it can."""
    try:
        return "" if NVRTC.version else "NVRTC has no version"
    except BuildError as error:
        return str(error)


needs_nvrtc = pytest.mark.skipif(nvrtc_is_missing() != "", reason=nvrtc_is_missing())


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
def test_every_option_compiles_with_nvrtc() -> None:
    kinds = itertools.cycle([("one-shot", 2), ("two-shot", 3), ("local", 1)])
    for chosen, (algorithm, world) in zip(all_options(), kinds, strict=False):
        made = chosen._replace(algorithm=algorithm, world=world)
        assert gpu_build.compile_variant(made, "sm_90").code.startswith(b"\x7fELF")


@needs_nvrtc
def test_machine_code_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_build, "cache_folder", lambda: tmp_path)
    code = gpu_build.machine_code(variant(), "sm_90")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [code]
    monkeypatch.setattr(gpu_build, "compile_variant", None)
    assert gpu_build.machine_code(variant(), "sm_90") == code


@needs_nvrtc
def test_variants_are_compiled_ahead_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_build, "cache_folder", lambda: tmp_path)
    variants = [variant()._replace(want_rstd=flag) for flag in (0, 1)]
    impossible = variant()._replace(world=-1)
    gpu_build.compile_ahead([*variants, impossible], "sm_90", threads=3)
    kept = {path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(BuildError):  # still said where it is asked for
        gpu_build.machine_code(impossible, "sm_90")
    monkeypatch.setattr(gpu_build, "compile_variant", None)
    codes = {gpu_build.machine_code(one, "sm_90") for one in variants}
    assert (codes, len(codes)) == (kept, 2)


@needs_nvrtc
def test_an_error_of_the_compiler_is_shown() -> None:
    with pytest.raises(BuildError, match="size of an array"):
        gpu_build.compile_variant(variant()._replace(world=-1), "sm_90")

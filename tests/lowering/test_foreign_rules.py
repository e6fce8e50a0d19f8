"""Which sites FlashInfer and AITER may take, over the whole grid of their limits."""

from __future__ import annotations

import itertools

import pytest
import torch

from fx_fusion.doctor.versions import FLASHINFER_FAULTS
from fx_fusion.lowering import aiter_rules, flashinfer_rules
from fx_fusion.lowering.aiter_rules import Release
from fx_fusion.lowering.site_form import SiteForm, plain_form_cause

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEWEST, SOUND = (0, 7, 4, 0), flashinfer_rules.SOUND
PLAIN = SiteForm(BF16, BF16)
AITER = Release("0.1.20", chooses_stage=True, one_plus_weight=True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.6.3", (0, 6, 3, 0)),
        ("0.7.2.post1", (0, 7, 2, 1)),
        ("0.7.0rc1", (0, 7, 0, 0)),
        ("unknown", None),
    ],
)
def test_a_release_is_read_from_its_name(
    text: str, version: flashinfer_rules.Version | None
) -> None:
    assert flashinfer_rules.parsed(text) == version


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (PLAIN, ""),
        (SiteForm(None, None, "none", norm_dtype=BF16), ""),
        (SiteForm(None, BF16, want_reduced=True), ""),
        (SiteForm(BF16, BF16, "1+w"), ""),
        (SiteForm(BF16, BF16, add_dtype=BF16, out_dtype=BF16), ""),
        (SiteForm(BF16, BF16, norm_dtype=FP32), ""),
        (SiteForm(BF16, BF16, bias=True), "no bias"),
        (SiteForm(BF16, BF16, scale=True), "no scale"),
        (SiteForm(BF16, BF16, eps_tensor=True), "eps as a number"),
        (SiteForm(FP32, BF16), "a residual of float32"),
        (SiteForm(BF16, FP32), "a weight of float32"),
        (SiteForm(BF16, BF16, add_dtype=FP32), "a cast of the reduced value of float32"),
        (SiteForm(BF16, BF16, out_dtype=FP32), "an output of float32"),
        (SiteForm(BF16, BF16, norm_dtype=BF16), "rounds first"),
        (SiteForm(None, None, "none", norm_dtype=FP16), "rounds first"),
        (SiteForm(BF16, BF16, want_rstd=True), "reciprocal root"),
        (SiteForm(BF16, BF16, want_reduced=True), "the reduced value"),
    ],
)
def test_a_form_that_the_kernels_cannot_give_has_its_cause(form: SiteForm, says: str) -> None:
    found = plain_form_cause(form, BF16)
    assert says in found
    assert bool(says) == bool(found)
    assert (found in flashinfer_rules.cause(NEWEST, "sm_90", 2, BF16, 4096, form)) or not found
    assert (found in aiter_rules.cause(AITER, "gfx942", 2, BF16, 4096, form)) or not found


def flashinfer(
    version: flashinfer_rules.Version | None = NEWEST,
    arch: str = "sm_90",
    world_size: int = 2,
    dtype: torch.dtype = BF16,
    hidden_size: int = 4096,
    weight_form: str = "w",
) -> str:
    form = SiteForm(dtype, dtype, weight_form)
    return flashinfer_rules.cause(version, arch, world_size, dtype, hidden_size, form)


def test_flashinfer_s_hardware_and_sizes() -> None:
    assert flashinfer() == flashinfer(None) == ""
    for arch in ("sm_80", "sm_89", "gfx942", "cpu"):
        assert arch in flashinfer(arch=arch)
    taken = {size for size in range(2, 17) if not flashinfer(world_size=size)}
    assert taken == {2, 4, 8, 16}
    assert "whole 16 bytes" in flashinfer(hidden_size=4100)
    assert flashinfer(hidden_size=4104) == ""
    assert "1024 threads" in flashinfer(hidden_size=8200)  # 1025 vectors, no cluster
    assert flashinfer(hidden_size=16384) == ""


@pytest.mark.parametrize(
    ("version", "changes", "says"),
    [
        ((0, 5, 3, 0), {}, "0.6.0"),
        ((0, 6, 3, 0), {}, ""),
        ((0, 6, 10, 0), {}, "over all ranks"),
        ((0, 6, 11, 0), {}, ""),
        ((0, 6, 14, 0), {"hidden_size": 2880}, "may add up such rows wrongly"),
        ((0, 6, 15, 0), {"hidden_size": 2880}, ""),
        ((0, 6, 14, 0), {"hidden_size": 5376}, "may add up such rows wrongly"),
        ((0, 7, 2, 0), {"dtype": FP32}, "float32"),
        (SOUND, {"dtype": FP32}, ""),
        ((0, 6, 11, 0), {"weight_form": "1+w"}, "1 + w"),
        ((0, 6, 12, 0), {"weight_form": "1+w"}, ""),
    ],
)
def test_a_release_is_refused_for_what_it_gets_wrong(
    version: flashinfer_rules.Version, changes: dict[str, object], says: str
) -> None:
    found = flashinfer(version, **changes)  # type: ignore[arg-type]
    assert says in found
    assert bool(says) == bool(found)
    assert flashinfer(SOUND, **changes) == ""  # type: ignore[arg-type]


def test_flashinfer_takes_no_call_that_its_memory_or_kernels_do_not_hold() -> None:
    grid = itertools.product(
        ((0, 6, 3, 0), (0, 7, 1, 0), SOUND, NEWEST),
        (2, 4, 8, 16),
        (BF16, FP16, FP32),
        (64, 2880, 4096, 8192, 16384),
        (0, 1, 2, 3, 8, 16, 17, 64, 128, 129, 512, 2048, 8192),
    )
    chosen = set()
    for version, world_size, dtype, hidden_size, tokens in grid:
        found = flashinfer_rules.algorithm(version, world_size, dtype, hidden_size, tokens)
        fits = 0 < tokens * hidden_size <= flashinfer_rules.capacity(world_size, dtype.itemsize)
        assert bool(found) == fits
        if found == "two-shot":
            assert version >= SOUND
            assert tokens > world_size
        # all ranks' rows stay far below 2 GiB, in which it counts
        assert not fits or world_size * tokens * hidden_size * dtype.itemsize < 2**30
        chosen.add(found)
    assert chosen == {"", "one-shot", "two-shot"}


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("element_size", [2, 4])
def test_flashinfer_s_memory_stays_below_its_limit(world_size: int, element_size: int) -> None:
    elements = flashinfer_rules.capacity(world_size, element_size)
    # its two-shot buffer has 2 bytes an element, or 4 for fp32 since that was mended
    buffers = world_size * elements * element_size * (1 + 3)
    assert buffers <= flashinfer_rules.MEMORY_BYTES


def test_doctor_warns_of_the_releases_that_the_rules_refuse_something_of() -> None:
    warned = {flashinfer_rules.parsed(fault.below) for fault in FLASHINFER_FAULTS}
    assert {flashinfer_rules.PARTIAL_WARPS, flashinfer_rules.SOUND} <= warned


def test_programmatic_launch_waits_for_a_sound_release() -> None:
    assert not flashinfer_rules.programmatic((0, 7, 1, 0))
    assert flashinfer_rules.programmatic(SOUND)


def aiter(
    release: Release | None = AITER,
    arch: str = "gfx942",
    world_size: int = 2,
    hidden_size: int = 4096,
    weight_form: str = "w",
) -> str:
    form = SiteForm(BF16, BF16, weight_form)
    return aiter_rules.cause(release, arch, world_size, BF16, hidden_size, form)


def test_aiter_s_hardware_sizes_and_releases() -> None:
    assert aiter() == aiter(None) == ""
    assert "sm_90" in aiter(arch="sm_90")
    assert "gfx1250" in aiter(arch="gfx1250")
    assert {size for size in range(2, 17) if not aiter(world_size=size)} == {2, 4, 8}
    assert "whole 16 bytes" in aiter(hidden_size=4100)
    assert aiter(hidden_size=16384) == ""
    assert aiter(hidden_size=16392) != ""
    old = Release("0.1.7", chooses_stage=False, one_plus_weight=False)
    assert "adds the residual before it rounds" in aiter(old)
    assert "1 + w" in aiter(AITER._replace(one_plus_weight=False), weight_form="1+w")


@pytest.mark.parametrize(
    ("world_size", "hidden_size", "tokens", "expected"),
    [
        (2, 8192, 8, "one-stage"),  # 131072 bytes, inclusive
        (2, 8192, 9, "two-stage"),
        (8, 8192, 4096, "two-stage"),  # 64 MiB, inclusive
        (8, 8192, 4097, ""),
        (2, 256, 257, ""),  # too short a row for two stages
        (2, 256, 256, "one-stage"),
        (4, 4104, 33, ""),  # 16929 vectors: one would be left out
        (4, 4104, 36, "two-stage"),
        (2, 16384, 1, "two-stage"),
        (2, 4096, 0, ""),
    ],
)
def test_aiter_s_algorithm_follows_bytes_and_shares(
    world_size: int, hidden_size: int, tokens: int, expected: str
) -> None:
    found = aiter_rules.algorithm(AITER, world_size, BF16, hidden_size, tokens)
    assert found == expected


def test_aiter_s_one_stage_limit_can_be_moved() -> None:
    more = AITER._replace(one_stage_bytes=2**20)
    assert aiter_rules.algorithm(more, 2, BF16, 8192, 64) == "one-stage"

"""No usual variant of the GPU kernels up to hidden size 8192 spills registers on NVIDIA GPUs.

`kernel_registers.py` compiles all of them; here it's the tightest of each kind: the one with the
least registers a thread.
"""

from __future__ import annotations

import pytest
from kernel_registers import ARCHS, HIDDEN, NO_SPILLS_UP_TO, Case, cases, recorded

from fx_fusion.lowering import gpu_build
from fx_fusion.lowering.gpu_variant import Variant
from fx_fusion.lowering.runtime_compiler import NVRTC, BuildError

#: Registers of a thread are given out in such steps.
STEP = 8
SIZES = tuple(hidden for hidden in HIDDEN if hidden <= NO_SPILLS_UP_TO)


#: Known to spill eight bytes: 16 ranks on GPUs without clusters, long rows of float32 with float32
#: residual and bias and every result. Arch, world size, dtype, options.
KNOWN = ("sm_80", 16, "float32", "all")


def nvrtc_version() -> str:
    try:
        return NVRTC.version
    except BuildError:
        return ""


def tightest(arch: str, worlds: tuple[int, ...]) -> list[Case]:
    """Of each algorithm, world, dtype and options, the most threads at once."""
    found: dict[tuple[object, ...], Case] = {}
    for case in cases((arch,), worlds, hidden_sizes=SIZES):
        variant = case.variant
        known = found.get(case[:5])
        if known is None or order(variant) >= order(known.variant):
            found[case[:5]] = case
    return list(found.values())


def order(variant: Variant) -> tuple[int, int]:
    return variant.threads * variant.blocks, variant.vectors_per_thread


@pytest.mark.skipif(nvrtc_version() == "", reason="NVRTC isn't installed")
@pytest.mark.parametrize(
    ("arch", "worlds"), [("sm_80", (4,)), ("sm_90", (2, 8)), ("sm_100", (4,))]
)
def test_no_register_is_spilled(arch: str, worlds: tuple[int, ...]) -> None:
    version, lines = recorded()
    most = {line[:5]: line.registers for line in lines if line.hidden.startswith("<=")}
    for case in tightest(arch, worlds):
        used = gpu_build.compile_variant(case.variant, arch).resources
        assert used is not None
        assert (used.stack_bytes, used.spilled_bytes) == (0, 0), case
        if version == nvrtc_version():
            assert used.registers <= most[case[:5]] + STEP, f"{case}: write the table anew"


def test_the_recorded_table_has_no_spills_at_these_sizes() -> None:
    _, lines = recorded()
    small = [line for line in lines if line.hidden == f"<={NO_SPILLS_UP_TO}"]
    assert {line.arch for line in small} == set(ARCHS)
    spilling = [line for line in small if line.stack or line.spilled]
    assert {line[1:5] for line in spilling} <= {KNOWN}
    assert all(line.stack + line.spilled <= 16 for line in spilling)

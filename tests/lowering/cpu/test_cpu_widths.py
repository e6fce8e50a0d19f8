"""The kernel gives the same bits for every instruction set it can be built for."""

from __future__ import annotations

import importlib.resources
import subprocess
from pathlib import Path

import pytest
import torch

from fx_fusion.lowering.cpu_build import compiler

SOURCE = Path(__file__).with_name("widths.cpp")
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fno-fast-math", "-w", "-pthread")
#: As torch builds its own vector classes; -mfma would contract if it were allowed to.
SETS = {
    "scalar": ("", ()),
    "AVX2": ("avx2", ("-mavx2", "-mfma", "-mf16c")),
    "AVX512": (
        "avx512bw",
        ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"),
    ),
}


def available() -> list[str]:
    """The instruction sets this machine has."""
    cpu = Path("/proc/cpuinfo").read_text()
    return [name for name, (flag, _) in SETS.items() if not flag or f" {flag} " in cpu]


def digest_of(name: str, folder: Path) -> tuple[str, int]:
    """The digest of the outputs, and the elements of a vector."""
    csrc = importlib.resources.files("fx_fusion.lowering") / "csrc"
    macros = (
        () if name == "scalar" else (f"-DCPU_CAPABILITY_{name}", f"-DCPU_CAPABILITY={name}")
    )
    include = Path(torch.__file__).parent / "include"
    with importlib.resources.as_file(csrc) as path:
        command = [compiler(), *FLAGS, *SETS[name][1], *macros, f"-I{path}", f"-I{include}"]
        subprocess.run(
            [*command, str(SOURCE), "-o", str(folder / name)], check=True, timeout=240
        )
    done = subprocess.run(
        [folder / name], capture_output=True, text=True, check=True, timeout=60
    )
    digest, size = done.stdout.split()
    return digest, int(size)


def test_every_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    names = available()
    if len(names) < 2:
        pytest.skip(f"this machine has {names[0]} only: nothing to compare")
    digests = {name: digest_of(name, tmp_path) for name in names}
    assert len({digest for digest, _ in digests.values()}) == 1, digests
    if "AVX512" in digests:
        assert digests["AVX512"][1] == 2 * digests["AVX2"][1]

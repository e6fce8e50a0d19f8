"""The kernel's source under ThreadSanitizer (ranks are threads) and AddressSanitizer (processes).

The test's teeth are shown by a mutant: with one slot in place of two, a rank overwrites what
its peers still read, and both the sanitizer and the sums see it.
"""

from __future__ import annotations

import importlib.resources
import subprocess
from pathlib import Path

import pytest
import torch

from fx_fusion.lowering.cpu_build import compiler

HARNESS = Path(__file__).with_name("harness.cpp")
FLAGS = ("-std=c++20", "-O1", "-g", "-ffp-contract=off", "-w", "-pthread")


def build(folder: Path, sanitizer: str, source: str | None = None) -> Path:
    """The harness built with a sanitizer, over the kernel's source or a mutant of it."""
    csrc = importlib.resources.files("fx_fusion.lowering") / "csrc"
    with importlib.resources.as_file(csrc) as path:
        includes = [path]
        if source is not None:
            (folder / "cpu_all_reduce_add_rms_norm.cpp").write_text(source)
            includes = [folder, path]
        target = folder / "harness"
        command = [compiler(), *FLAGS, f"-fsanitize={sanitizer}"]
        command += [f"-I{include}" for include in includes]
        command += [f"-I{Path(torch.__file__).parent / 'include'}"]
        done = subprocess.run(
            [*command, str(HARNESS), "-o", str(target)],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    if "cannot find" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip(f"the compiler lacks the runtime of -fsanitize={sanitizer}")
    assert done.returncode == 0, done.stderr
    return target


def run(
    harness: Path, ranks: int, calls: int, seed: int, ranks_are: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # address space layouts of some kernels don't suit ThreadSanitizer: fix it
        ["setarch", "-R", str(harness), str(ranks), str(calls), str(seed), ranks_are],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("sanitizer", "ranks_are"), [("thread", "threads"), ("address,undefined", "processes")]
)
def test_no_schedule_races_or_strays(tmp_path: Path, sanitizer: str, ranks_are: str) -> None:
    harness = build(tmp_path, sanitizer)
    for ranks in (2, 3, 4):
        done = run(harness, ranks, 400, ranks, ranks_are)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "ok\n"


def test_a_single_slot_is_found_out(tmp_path: Path) -> None:
    csrc = importlib.resources.files("fx_fusion.lowering") / "csrc"
    source = (csrc / "cpu_all_reduce_add_rms_norm.cpp").read_text()
    mutant = source.replace("slot(owner, chunk & 1)", "slot(owner, 0)")
    assert mutant != source
    done = run(build(tmp_path, "thread", mutant), 3, 400, 1, "threads")
    assert done.returncode != 0
    assert "data race" in done.stderr or "wrong sum" in done.stderr

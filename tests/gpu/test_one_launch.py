"""The kernels with all ranks in one launch: their bits, and what compute-sanitizer says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import one_launch
import pytest
import torch
from gpu_support import FORMS

SANITIZER = "compute-sanitizer"
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
]


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8, 16])
def test_the_bits_are_those_of_the_contract(world_size: int) -> None:
    algorithms = one_launch.algorithms_for(world_size)
    forms = [form for form in FORMS if form.hidden <= 8192]
    assert one_launch.mixed_calls(world_size, 20, 7, algorithms, forms) == []


@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"there is no {SANITIZER}")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    path = os.pathsep.join([str(HERE.parent / "lowering"), os.environ.get("PYTHONPATH", "")])
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable]
    command += [str(HERE / "one_launch.py"), "--worlds", "2", "3", "--calls", "6"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ok" in done.stdout.split()

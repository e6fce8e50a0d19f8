"""Compiled kernels lie beside Inductor's cache, whether Inductor is loaded or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from fx_fusion.lowering.cache import cache_folder
assert not any(name.startswith("torch._inductor") for name in sys.modules)
before = cache_folder()
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(before)
print(cache_dir())
print(cache_folder())
"""


@pytest.mark.parametrize("given", [None, "relative", "/absolute/place"])
def test_the_folder_is_inductors(tmp_path: Path, given: str | None) -> None:
    environment = {n: v for n, v in os.environ.items() if n != "TORCHINDUCTOR_CACHE_DIR"}
    environment["TMPDIR"] = str(tmp_path)
    if given is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = given.replace("/absolute", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, inductors, after = done.stdout.split()
    assert before == after
    assert Path(before) == (tmp_path / inductors).absolute() / "fx_fusion"

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import fx_fusion


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


COMPILE = """
import torch, torch.distributed as dist, torch.nn.functional as F
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

@torch.compile(backend="fx_fusion")
def layer(x, residual, weight):
    hidden = funcol.all_reduce(x, "sum", dist.group.WORLD) + residual
    return F.rms_norm(hidden, (8,), weight, 1e-6), hidden

layer(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8))
"""


def test_every_public_name_loads() -> None:
    loaded = {name: getattr(fx_fusion, name) for name in fx_fusion.__all__}
    assert not [name for name, value in loaded.items() if isinstance(value, ModuleType)]
    assert dir(fx_fusion) == sorted(fx_fusion.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        getattr(fx_fusion, "explian")  # noqa: B009


def test_importing_it_and_its_names_without_torch_use_loads_no_torch() -> None:
    code = (
        "import sys, fx_fusion; fx_fusion.Reason, fx_fusion.FusionSettings(), fx_fusion.Target();"
        "assert fx_fusion.reports() == []; sys.exit('torch' in sys.modules)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["explain", "inductor_options"])
def test_a_module_does_not_hide_the_function_of_its_name(name: str) -> None:
    module: Any = importlib.import_module(f"fx_fusion.{name}")
    assert getattr(fx_fusion, name) is getattr(module, name)


def test_the_backend_needs_no_import_and_torch_logs_shows_what_it_did() -> None:
    done = python(COMPILE, TORCH_LOGS="+fx_fusion", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert done.returncode == 0, done.stderr
    summary = "fx_fusion: 1 of 1 all_reduces fused (inference graph); all_reduce 1 -> 0"
    assert done.stderr.count(summary) == 1
    assert "(): fused" in done.stderr  # the site, at debug level
    assert done.stdout == ""


def test_the_processes_that_spawn_starts_load_no_compiler() -> None:
    """Triton's interpreter, for one, is chosen before Triton is imported."""
    code = (
        "import sys, fx_fusion.testing;"
        " sys.exit(any(name in sys.modules for name in ('triton', 'torch._inductor')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

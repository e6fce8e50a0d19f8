"""Fixtures for tests that compile; a test module loads them with `pytest_plugins`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compile_support import QUICK
from torch._dynamo.utils import counters
from torch._inductor import config

import fx_fusion


@pytest.fixture(scope="session")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests of a run, so that C++ is compiled once."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def compiling(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from nothing: no compiled graphs, in memory or cached, and no reports."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_directory))
    monkeypatch.delenv("FX_FUSION_DISABLE", raising=False)
    for name in ("fxgraph", "aotautograd"):
        shutil.rmtree(cache_directory / name, ignore_errors=True)
    torch._dynamo.reset()
    counters.clear()
    fx_fusion.clear_reports()
    with config.patch(QUICK):
        yield
    torch._dynamo.reset()

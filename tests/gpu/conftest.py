"""Ranks that share a GPU run side by side under MPS, started here without touching the GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
import torch

MPS_CONTROL = "nvidia-cuda-mps-control"


@pytest.fixture(scope="session")
def side_by_side() -> Iterator[None]:
    """A user's MPS daemon where there are fewer GPUs than ranks; without it they take turns."""
    if torch.cuda.device_count() != 1 or shutil.which(MPS_CONTROL) is None:
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="mps_") as pipes,
        tempfile.TemporaryDirectory() as logs,
    ):
        names = {
            "CUDA_MPS_PIPE_DIRECTORY": pipes,
            "CUDA_MPS_LOG_DIRECTORY": logs,
            # Under MPS a module isn't loaded while another rank's kernel waits for this one.
            "CUDA_MODULE_LOADING": "EAGER",
        }
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ.update(names)
        subprocess.run([MPS_CONTROL, "-d"], check=True, timeout=60)
        if visible:  # the daemon's only GPU has the number 0 for its clients
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        try:
            yield
        finally:
            subprocess.run([MPS_CONTROL], input="quit\n", text=True, check=False, timeout=60)
            for name in names:
                os.environ.pop(name, None)
            if visible:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible

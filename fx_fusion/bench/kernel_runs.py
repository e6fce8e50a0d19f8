"""Runs of the kernels benchmark on real ranks: under MPS daemons of its own, and what is left of one
that fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from fx_fusion.bench.kernel_times import Job, Measured, rank_job, saved
from fx_fusion.errors import SpawnError
from fx_fusion.testing import spawn

MPS_CONTROL: Final = "nvidia-cuda-mps-control"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_SECONDS: Final = 60


def measured_runs(
    job: Job, world_size: int, timeout: float, daemons: int
) -> list[list[Measured]]:
    """One run, or one under each of so many MPS daemons; those that fail at once are left out.

    Raises:
        SpawnError: None got as far as one size.
    """
    runs: list[list[Measured]] = []
    for number in range(daemons or 1):
        with mps_daemon() if daemons else contextlib.nullcontext():
            try:
                runs.append(measured_run(job, world_size, timeout))
            except SpawnError as error:
                if number == (daemons or 1) - 1 and not runs:
                    raise
                sys.stderr.write(
                    f"{error}\n\nRun {number + 1} of {daemons} measured nothing.\n"
                )
    return runs


def measured_run(job: Job, world_size: int, timeout: float) -> list[Measured]:
    """One run; if it fails after some sizes, those, and what went wrong on stderr.

    Raises:
        SpawnError: It failed before any size was done.
    """
    with tempfile.TemporaryDirectory(prefix="fx_fusion_bench_") as folder:
        partial = str(Path(folder) / "measured")
        try:
            with told_to_end():
                found: list[Measured] = spawn(
                    rank_job,
                    world_size,
                    device="cuda",
                    timeout=timeout,
                    args=(job._replace(partial=partial),),
                )[0]
        except SpawnError as error:
            found = saved(partial)
            if not found:
                raise
            done = len({(one.tokens, one.hidden_size) for one in found})
            sys.stderr.write(
                f"{error}\n\nThe run ended after {done} of {len(job.sizes)} sizes, which follow.\n"
            )
    return found


@contextlib.contextmanager
def told_to_end() -> Iterator[None]:
    """Turn SIGTERM (of `timeout`, of a batch system) into an error, so that what is done is kept."""

    def end(*_: object) -> None:
        raise SpawnError("The run was told to end (SIGTERM).")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def mps_daemon() -> Iterator[None]:
    """A user's MPS daemon, under which processes that are started now run side by side on a GPU.

    It changes no setting of the GPU and ends with the context.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mps_") as pipes,
        tempfile.TemporaryDirectory(prefix="mps_log_") as logs,
    ):
        given = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": logs}
        before = {name: os.environ.get(name) for name in (*given, _VISIBLE)}
        count = torch.cuda.device_count()
        os.environ.update(given)
        subprocess.run([MPS_CONTROL, "-d"], check=True, timeout=_SECONDS)
        if before[_VISIBLE] is not None:
            # the daemon chose the GPUs; its clients count them from 0
            os.environ[_VISIBLE] = ",".join(map(str, range(count)))
        try:
            yield
        finally:
            subprocess.run(
                [MPS_CONTROL], input="quit\n", text=True, check=False, timeout=_SECONDS
            )
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def daemon_cause(daemons: int, world_size: int) -> str:
    """Why so many MPS daemons can't be had, "" if they can or none is wanted."""
    if not daemons:
        return ""
    if shutil.which(MPS_CONTROL) is None:
        return f"--daemons {daemons}: {MPS_CONTROL} is not installed."
    if torch.cuda.device_count() >= world_size:
        return f"--daemons {daemons}: each of the {world_size} ranks has a GPU of its own."
    return ""

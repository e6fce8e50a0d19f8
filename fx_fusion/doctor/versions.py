"""Which versions are installed, and which of them are known to be bad."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Final

import torch

import fx_fusion
from fx_fusion import compat
from fx_fusion.doctor.check import Check, numbers_of


@dataclass(frozen=True)
class KnownBad:
    """Versions below `below` of a distribution have a fault."""

    below: str
    fault: str


FLASHINFER: Final = "flashinfer-python"
#: Each fault is gone from the version named on; found by comparing FlashInfer's releases.
FLASHINFER_FAULTS: Final = (
    # The barrier of two-shot could take an old flag for a new one where the grid grows, and its
    # fp32 workspace was sized for two bytes an element: both fixed in 0.7.2.post1.
    KnownBad("0.7.2.post1", "two-shot races, and writes past its workspace in fp32"),
    # flashinfer issue 5081: with programmatic launch the residual was read before the kernel
    # that writes it had ended; the fix is in from 0.7.1 on.
    KnownBad("0.7.1", "programmatic launch reads a stale residual"),
    # flashinfer pull request 3880, in from 0.6.15 on: a block of 180 threads lost lanes.
    KnownBad("0.6.15", "sums are wrong where hidden size / 8 is no multiple of 32, as 2880"),
)
AITER: Final = "amd-aiter"
#: The one release of amd-aiter on PyPI; AITER's later fixes are in builds from its repository.
AITER_ON_PYPI: Final = (0, 1, 7, 2, 18)
#: Below it, upstream skips its tests of symmetric memory on ROCm because they hang (pytorch
#: pull requests 192155 and 193980).
SYMMETRIC_MEMORY_ROCM: Final = (10, 1)


def installed(distribution: str) -> str:
    """The version of a distribution, "" if it isn't installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def python_and_fx_fusion() -> list[Check]:
    """The interpreter and this package."""
    own, python = fx_fusion.__version__, platform.python_version()
    return [
        Check("fx_fusion", "ok", own, shared=own),
        Check("python", "ok", python, shared=python, differs="warn"),
    ]


def torch_and_triton() -> list[Check]:
    """torch, what it was built for, and triton."""
    version, triton = compat.versions()
    cuda, hip = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "CPU only"
    text = f"{version}, built for {built}" if cuda or hip else f"{version}, {built}"
    oldest, newest = (".".join(map(str, v)) for v in (compat.OLDEST, compat.NEWEST))
    number = numbers_of(version)[:2]
    if number < compat.OLDEST:
        remedy = f"pip install 'torch>={oldest}'"
        checks = [Check("torch", "fail", f"{text}: older than {oldest}", remedy, shared=text)]
    elif number > compat.NEWEST:
        remedy = f"If a model isn't fused or doesn't compile, try torch {newest}."
        checks = [Check("torch", "warn", f"{text}: newer than known", remedy, shared=text)]
    else:
        checks = [Check("torch", "ok", text, shared=text)]
    if hip and numbers_of(hip)[:2] < SYMMETRIC_MEMORY_ROCM:
        checks.append(
            Check(
                "HIP",
                "warn",
                f"{hip}: torch's own tests of symmetric memory hang before ROCm 10.1",
                'Keep kernel="unfused" on this machine, or use ROCm 10.1 or later.',
            )
        )
    if triton:
        checks.append(Check("triton", "ok", triton, shared=triton))
    elif cuda or hip:
        remedy = (
            "Install the triton that came with this torch: reinstall torch with its wheels."
        )
        text = "not installed; Inductor compiles for GPUs with it"
        checks.append(Check("triton", "warn", text, remedy, shared="none"))
    else:
        checks.append(Check("triton", "ok", "not installed; GPUs alone need it", shared="none"))
    return checks


def other_libraries() -> list[Check]:
    """FlashInfer and AITER, which other software on the machine may use beside fx_fusion."""
    checks = []
    if version := installed(FLASHINFER):
        faults = [
            bad.fault
            for bad in FLASHINFER_FAULTS
            if numbers_of(version) < numbers_of(bad.below)
        ]
        checks.append(
            Check(
                "FlashInfer",
                "warn" if faults else "ok",
                "; ".join([version, *faults]),
                f"pip install '{FLASHINFER}>={FLASHINFER_FAULTS[0].below}'" if faults else "",
                shared=version,
            )
        )
    else:
        checks.append(Check("FlashInfer", "ok", "not installed, not needed", shared="none"))
    if version := installed(AITER):
        old = numbers_of(version) <= AITER_ON_PYPI
        checks.append(
            Check(
                "AITER",
                "warn" if old else "ok",
                f"{version}: older than its fixes of wrong results" if old else version,
                "Build AITER from its repository, for your ROCm." if old else "",
                shared=version,
            )
        )
    elif version := installed("aiter"):
        text = f"the package aiter {version}; the one on PyPI is an unrelated library"
        remedy = f"If you meant AMD's: pip uninstall aiter, then install {AITER}."
        checks.append(Check("AITER", "warn", text, remedy, shared=f"aiter {version}"))
    else:
        checks.append(Check("AITER", "ok", "not installed, not needed", shared="none"))
    return checks

"""Which kernel runs a site: the one place that decides, from a table of measurements.

The pass, the op and the sizing of workspaces all ask `select`. It is pure: it looks at the
problem, the settings and the table, never at the process, so that every rank, and a machine
that plans for another, gets the same answer.

Today the table is empty and the only kernel is "unfused": the group's own all_reduce, then add
and norm, inside the op. A kernel is entered here when it has been measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

import torch

from fx_fusion.report import Number, Reason
from fx_fusion.settings import FusionSettings


@dataclass(frozen=True)
class Problem:
    """A site in the terms that choose a kernel.

    Attributes:
        hidden_size: Elements of the last dimension.
        dtype: The reduced tensor's dtype.
        world_size: Ranks in the group.
        arch: "cpu", "sm_90", "gfx942".
        tokens: Rows, if known when compiling; None where they're dynamic. A kernel's own
            limits on tokens go into the plan, so a static and a dynamic graph agree.
        deterministic: Only sums in rank order are allowed.
    """

    hidden_size: int
    dtype: torch.dtype
    world_size: int
    arch: str
    tokens: int | None
    deterministic: bool


@dataclass(frozen=True)
class Row:
    """One measured limit: `kernel` is the fastest up to and including `max_tokens`.

    Attributes:
        kernel: The kernel's name.
        arch: Where it holds, and with `world_size`, `dtype` and `hidden_size` for what.
        world_size: Ranks in the group.
        dtype: The reduced tensor's dtype, "bfloat16".
        hidden_size: Elements of the last dimension.
        max_tokens: The limit itself, inclusive.
        machine: What it was measured on.
        date: When, as YYYY-MM-DD.
        command: The command that measured it.
    """

    kernel: str
    arch: str
    world_size: int
    dtype: str
    hidden_size: int
    max_tokens: int
    machine: str
    date: str
    command: str


#: The measurements. Empty until a kernel of our own exists; no number comes in unmeasured.
TABLE: Final[tuple[Row, ...]] = ()

#: The kernels that exist. The unfused path takes every problem.
UNFUSED: Final = "unfused"
_AVAILABLE: Final = (UNFUSED,)


@dataclass(frozen=True)
class Plan:
    """The kernel for a site.

    Attributes:
        kernel: Its name, "unfused".
        digest: What the choice rests on (`digest_of`); the op's `plan` argument, by which
            ranks and graphs that were planned differently are told apart.
    """

    kernel: str
    digest: str


@dataclass(frozen=True)
class Refusal:
    """Why a site stays as it is.

    Attributes:
        reason: The reason, which has a remedy in `report.REMEDIES`.
        numbers: The values that caused it.
    """

    reason: Reason
    numbers: Mapping[str, Number] = field(default_factory=dict)


def select(problem: Problem, settings: FusionSettings) -> Plan | Refusal:
    """Choose the kernel for `problem`.

    Returns:
        A Plan, or a Refusal with KERNEL_UNAVAILABLE where `settings.kernel` names a kernel
        that can't run here.
    """
    kernel = UNFUSED if settings.kernel == "auto" else settings.kernel
    if kernel not in _AVAILABLE:
        return Refusal(
            Reason.KERNEL_UNAVAILABLE,
            {
                "kernel": kernel,
                "available": ", ".join(_AVAILABLE),
                "arch": problem.arch,
                "world_size": problem.world_size,
                "dtype": str(problem.dtype).removeprefix("torch."),
                "hidden_size": problem.hidden_size,
            },
        )
    return Plan(kernel, digest_of(settings))


def digest_of(settings: FusionSettings, table: Sequence[Row] = TABLE) -> str:
    """Twelve hex digits over the table and the settings that choose from it.

    Facts of one site aren't in it, so that all graphs of a process that share settings share
    the digest; `deterministic` is an argument of the op already.
    """
    content = {"kernel": settings.kernel, "table": [asdict(row) for row in table]}
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

"""Which GPU kernel runs how many tokens: the table of measurements, and what follows from it.

Pure functions of what is equal on every rank; `select` decides with them, and the op and the
workspaces ask them too.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from fx_fusion.lowering import gpu_layout


@dataclass(frozen=True)
class Row:
    """One measured limit: `kernel` is the fastest up to and including `max_tokens`.

    Of one size, one-shot holds up to its limit, then two-shot up to its own, then unfused:

        Row(GPU_ONE_SHOT, "sm_90", 4, "bfloat16", 4096, 64, "4 x H200", "2026-01-31", "..."),
        Row(GPU_TWO_SHOT, "sm_90", 4, "bfloat16", 4096, 512, "4 x H200", "2026-01-31", "..."),

    A size without a row of a kernel never takes that kernel.

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


#: The GPU kernels; see `gpu_algorithm` for which runs.
GPU_ONE_SHOT: Final = "one-shot over symmetric memory"
GPU_TWO_SHOT: Final = "two-shot over symmetric memory"

_H200_PAIR: Final = ("2 x NVIDIA H200 (NVLink), torch 2.11", "2026-11-29")
_H200_PAIR_NEXT_DAY: Final = (_H200_PAIR[0], "2026-11-30")
_BENCH: Final = "fx-fusion bench kernels --world-size 2"
_LARGE: Final = f"{_BENCH} --tokens 256,1024,8192 --hidden-size 2880,8192"
_WIDE: Final = f"{_BENCH} --tokens 1,8,64,1024 --hidden-size 4096,16384"
_FLOAT16: Final = (
    f"{_BENCH} --dtype float16 --tokens 1,32,128,1024,8192 --hidden-size 2880,8192"
)
_FLOAT32: Final = _FLOAT16.replace("float16", "float32")

#: The measurements; no number comes in unmeasured. Of two ranks one-shot was faster than the best
#: without fusion at every size, of 8192 tokens at most: 1.2 to 2.9 times in 16 bits, 1.05 to 3.1
#: times in fp32; more weren't measured.
TABLE: Final[tuple[Row, ...]] = (
    Row(GPU_ONE_SHOT, "sm_90", 2, "bfloat16", 2880, 8192, *_H200_PAIR, _LARGE),
    Row(GPU_ONE_SHOT, "sm_90", 2, "bfloat16", 8192, 8192, *_H200_PAIR, _LARGE),
    Row(GPU_ONE_SHOT, "sm_90", 2, "bfloat16", 16384, 1024, *_H200_PAIR_NEXT_DAY, _WIDE),
    Row(GPU_ONE_SHOT, "sm_90", 2, "float16", 2880, 8192, *_H200_PAIR_NEXT_DAY, _FLOAT16),
    Row(GPU_ONE_SHOT, "sm_90", 2, "float16", 8192, 8192, *_H200_PAIR_NEXT_DAY, _FLOAT16),
    Row(GPU_ONE_SHOT, "sm_90", 2, "float32", 2880, 8192, *_H200_PAIR_NEXT_DAY, _FLOAT32),
    Row(GPU_ONE_SHOT, "sm_90", 2, "float32", 8192, 8192, *_H200_PAIR_NEXT_DAY, _FLOAT32),
)
#: Where the kernels are proven but no row of the table holds, one-shot runs while a rank sends so
#: many bytes at most, (W-1) times its x. Between two H200s 2 MiB took 10.2 us, the best without
#: fusion 22.1; with 4 and 8 ranks on one H200 0.75 MiB took 5.9 us, the best without 12.3.
GPU_SAFE_SENT_BYTES: Final = 1024 * 1024

#: Arch and world size for which the GPU kernels' tests (tests/gpu/test_one_shot.py) have passed
#: on such a GPU; elsewhere they run only if `kernel="fx_fusion"`. Two ranks: on two H200s and on
#: one that they share; more: on one H200 that they share.
GPU_PROVEN: Final[frozenset[tuple[str, int]]] = frozenset(
    {("sm_90", 2), ("sm_90", 3), ("sm_90", 4), ("sm_90", 6), ("sm_90", 8)}
)
#: Archs on which the local add+norm kernel's tests have passed; elsewhere it runs only if
#: `kernel="fx_fusion"`. It changes no norm by more than an ulp and meets no other rank.
GPU_LOCAL_PROVEN: Final[frozenset[str]] = frozenset({"sm_90"})
#: AMD's GPUs that the kernels compile for. None has run them yet, so none is in GPU_PROVEN.
AMD_ARCHS: Final = ("gfx90a", "gfx942", "gfx950")
#: Up to how many bytes of x, by world size, one-shot is taken for faster than two-shot where no
#: row of the table says. Provisional until measured: from the link's 400 GB/s and 1 us for the
#: second hop, B = 1 us * 400 GB/s / ((W-1) (1 - 2/W)), rounded to a power of two. The hop: of one
#: token two-shot takes 0.7 us more than one-shot with 3 and 4 ranks on one H200, and one-shot
#: takes 0.3 us more between two H200s than between two ranks on one.
GPU_ONE_SHOT_BYTES: Final = {3: 512 * 1024, 4: 256 * 1024, 6: 128 * 1024, 8: 64 * 1024}
#: The same for more ranks than those.
GPU_ONE_SHOT_LEAST_BYTES: Final = 32 * 1024


class GpuLimits(NamedTuple):
    """Up to how many tokens, inclusive, an algorithm runs; one-shot is asked first.

    Attributes:
        one_shot: 0 for never.
        two_shot: 0 for never.
    """

    one_shot: int
    two_shot: int


@functools.lru_cache(maxsize=1024)
def gpu_limits(
    kernel: str,
    arch: str,
    world_size: int,
    dtype: torch.dtype,
    hidden_size: int,
    deterministic: bool,
) -> GpuLimits:
    """Which GPU kernel runs up to how many tokens.

    Args:
        kernel: What the plan was made for: "auto"; "fx_fusion", with which our kernels take
            every size; "one_shot", "two_shot" or "triton", see `select.forced_plan`.
        arch: "sm_90".
        world_size: Ranks in the group.
        dtype: The reduced tensor's dtype.
        hidden_size: Elements of the last dimension. With "auto" the rows of the table for the
            next larger size that was measured hold; without one `GPU_SAFE_SENT_BYTES` does.
        deterministic: The kernels add up in rank order, so then they take every size too, where
            their tests have passed.
    """
    if not gpu_takes(arch, world_size, hidden_size):
        return GpuLimits(0, 0)
    two_ranks = world_size == 2  # of whom two-shot would send as much as one-shot
    if kernel in ("one_shot", "triton") or (kernel == "two_shot" and two_ranks):
        return GpuLimits(sys.maxsize, 0)
    if kernel == "two_shot":
        return GpuLimits(0, sys.maxsize)
    if kernel != "fx_fusion" and (kernel != "auto" or (arch, world_size) not in GPU_PROVEN):
        return GpuLimits(0, 0)
    measured = GpuLimits(
        _measured(GPU_ONE_SHOT, arch, world_size, dtype, hidden_size),
        0 if two_ranks else _measured(GPU_TWO_SHOT, arch, world_size, dtype, hidden_size),
    )
    if kernel == "auto" and not deterministic:
        sent = (world_size - 1) * hidden_size * dtype.itemsize  # a token
        return measured if max(measured) else GpuLimits(GPU_SAFE_SENT_BYTES // sent, 0)
    if two_ranks:
        return GpuLimits(sys.maxsize, 0)
    bound = next(
        (size for ranks, size in GPU_ONE_SHOT_BYTES.items() if world_size <= ranks),
        GPU_ONE_SHOT_LEAST_BYTES,
    )
    guess = max(1, bound // (hidden_size * dtype.itemsize))
    return GpuLimits(measured.one_shot or guess, sys.maxsize)


def _measured(
    kernel: str, arch: str, world_size: int, dtype: torch.dtype, hidden_size: int
) -> int:
    """The limit of the table's row for the next larger hidden size; 0 without one."""
    name = str(dtype).removeprefix("torch.")
    rows = [
        row
        for row in TABLE
        if (row.kernel, row.arch, row.world_size, row.dtype) == (kernel, arch, world_size, name)
        and row.hidden_size >= hidden_size
    ]
    return min(rows, key=lambda row: row.hidden_size).max_tokens if rows else 0


def gpu_max_tokens(
    kernel: str,
    arch: str,
    world_size: int,
    dtype: torch.dtype,
    hidden_size: int,
    deterministic: bool,
) -> int:
    """Up to how many tokens, inclusive, a call runs on a GPU kernel of ours; 0 for never.

    Arguments as in `gpu_limits`.
    """
    return max(gpu_limits(kernel, arch, world_size, dtype, hidden_size, deterministic))


def gpu_algorithm(
    kernel: str,
    arch: str,
    world_size: int,
    dtype: torch.dtype,
    hidden_size: int,
    tokens: int,
    deterministic: bool,
) -> str:
    """How a call on a GPU runs: "one-shot", "two-shot" or "unfused"; the same on every rank.

    Arguments as in `gpu_limits`; `tokens` are the call's rows.
    """
    limits = gpu_limits(kernel, arch, world_size, dtype, hidden_size, deterministic)
    if tokens <= limits.one_shot:
        return "one-shot"
    return "two-shot" if tokens <= limits.two_shot else "unfused"


def gpu_takes_local(kernel: str, arch: str, hidden_size: int) -> bool:
    """True if add and norm after the group's own all_reduce run as one kernel of ours.

    Args:
        kernel: What the plan was made for.
        arch: "sm_90".
        hidden_size: Elements of the last dimension.
    """
    wanted = kernel == "fx_fusion" or arch in GPU_LOCAL_PROVEN
    return wanted and gpu_takes(arch, 2, hidden_size)


def gpu_takes(arch: str, world_size: int, hidden_size: int) -> bool:
    """True if a GPU kernel of ours can run at all.

    Args:
        arch: "sm_90", "gfx942".
        world_size: Ranks in the group.
        hidden_size: Elements of the last dimension.
    """
    number = arch.removeprefix("sm_")
    nvidia = arch.startswith("sm_") and number.isdecimal() and int(number) >= 80
    return (nvidia or arch in AMD_ARCHS) and gpu_layout.takes(hidden_size, world_size)

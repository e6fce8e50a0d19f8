"""Which sites FlashInfer's all_reduce + add + RMSNorm may take: pure functions of equal facts.

The limits are those of its TensorRT-LLM kernels, read from its sources; where a release gets
something wrong, the release that mended it stands beside the rule. With fp32 accumulation it adds
up in rank order, rounds, adds the residual and rounds: reduced value and new residual are bitwise
those of the contract. The norm is rounded once, after the weight. Its waits have no time limit.
"""

from __future__ import annotations

import re
from typing import Final

import torch

from fx_fusion.lowering.site_form import SiteForm, plain_form_cause

#: A release as (major, minor, patch, post).
Version = tuple[int, int, int, int]
#: Ranks that its kernels are compiled for.
WORLD_SIZES: Final = (2, 4, 8, 16)
#: The unified interface, and in it the process group, without which it meets over all ranks.
FIRST: Final[Version] = (0, 6, 0, 0)
TORCH_SYMMETRIC_MEMORY: Final[Version] = (0, 6, 10, 0)
TAKES_GROUP: Final[Version] = (0, 6, 11, 0)
#: `weight_bias`, for a weight of 1 + w.
WEIGHT_BIAS: Final[Version] = (0, 6, 12, 0)
#: Before it, blocks with a part of a warp may add up too few squares (its pull request 3880); 0.6.3
#: was right at hidden size 2880 on an H200 all the same, in bench kernels.
PARTIAL_WARPS: Final[Version] = (0, 6, 15, 0)
#: Before it, the two-shot barrier could be passed too early, its memory was too small for fp32,
#: and (before 0.7.1) programmatic launch read the residual before it was written.
SOUND: Final[Version] = (0, 7, 2, 1)
#: Bytes a rank gives for its memory, at most: 128 MiB.
MEMORY_BYTES: Final = 2**27
#: MiB of rows, as `_one_shot_mebibytes` counts them, up to which it takes one-shot (measured by its
#: authors on a B200); for 16 ranks it has no figure.
_ONE_SHOT_MEBIBYTES: Final = {2: 512, 4: 64, 8: 42, 16: 42}
_VECTOR_BYTES: Final = 16
_MAX_CLUSTER: Final = 8
_LEAST_THREADS: Final = 128
_MAX_THREADS: Final = 1024
_WARP: Final = 32


def parsed(text: str) -> Version | None:
    """A release by its name, "0.7.2.post1"; None if it isn't one."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", text)
    if found is None:
        return None
    major, minor, patch, post = (int(part or 0) for part in found.groups())
    return major, minor, patch, post


def cause(
    version: Version | None,
    arch: str,
    world_size: int,
    dtype: torch.dtype,
    hidden_size: int,
    form: SiteForm | None,
) -> str:
    """Why FlashInfer takes no call of a site; "" if it takes some.

    Args:
        version: The release that all ranks have; None for whether any release does.
        arch: "sm_90".
        world_size: Ranks in the group.
        dtype: The reduced tensor's dtype.
        hidden_size: Elements of a row.
        form: What the site computes; None to leave that out.
    """
    number = arch.removeprefix("sm_")
    if not (arch.startswith("sm_") and number.isdecimal() and int(number) >= 90):
        return f"FlashInfer's kernels need sm_90 or newer, not {arch}"
    if world_size not in WORLD_SIZES:
        sizes = ", ".join(map(str, WORLD_SIZES))
        return f"FlashInfer's kernels take {sizes} ranks, not {world_size}"
    if hidden_size * dtype.itemsize % _VECTOR_BYTES or not hidden_size:
        return f"FlashInfer's kernels take rows of whole 16 bytes, not {hidden_size} elements"
    if hidden_size > capacity(world_size, dtype.itemsize):
        return f"a row of {hidden_size} elements doesn't fit its memory"
    threads = hidden_size * dtype.itemsize // _VECTOR_BYTES
    if block_threads(threads) > _MAX_THREADS:
        return f"a row of {hidden_size} elements needs more than 1024 threads a block"
    if form is not None and (found := plain_form_cause(form, dtype)):
        return f"FlashInfer's kernel can't give these numbers: {found}"
    return "" if version is None else _release_cause(version, dtype, threads, form)


def _release_cause(
    version: Version, dtype: torch.dtype, threads: int, form: SiteForm | None
) -> str:
    name = _text(version)
    if version < FIRST:
        return f"FlashInfer {name} lacks the interface of 0.6.0"
    if TORCH_SYMMETRIC_MEMORY <= version < TAKES_GROUP:
        return f"FlashInfer {name} meets over all ranks, whatever the group; 0.6.11 doesn't"
    if version < PARTIAL_WARPS and block_threads(threads) % _WARP:
        return f"FlashInfer {name} may add up such rows wrongly; 0.6.15 doesn't"
    if version < SOUND and dtype == torch.float32:
        return f"FlashInfer {name} has too little memory for float32; 0.7.2.post1 hasn't"
    if form is not None and form.weight_form == "1+w" and version < WEIGHT_BIAS:
        return f"FlashInfer {name} has no weight of 1 + w; 0.6.12 has"
    return ""


def block_threads(threads: int) -> int:
    """Threads of a block for a row of so many vectors, before the grid is fitted to the GPU.

    The fit only doubles them, which keeps whole warps whole.
    """
    cluster = _MAX_CLUSTER
    while threads % cluster:
        cluster //= 2
    block = threads // cluster
    while block < _LEAST_THREADS and cluster >= 2:
        block *= 2
        cluster //= 2
    return block


def capacity(world_size: int, element_size: int) -> int:
    """Elements of x that its memory is made for: 8 or 14 bytes for each, and for each rank."""
    for_each = 8 if element_size == 2 else 16
    return MEMORY_BYTES // (for_each * world_size)


def algorithm(
    version: Version, world_size: int, dtype: torch.dtype, hidden_size: int, tokens: int
) -> str:
    """How a call runs: "one-shot", "two-shot", or "" where it has to take the unfused path."""
    if not 0 < tokens * hidden_size <= capacity(world_size, dtype.itemsize):
        return ""
    if version < SOUND or tokens <= world_size:
        return "one-shot"
    mebibytes = tokens * hidden_size * dtype.itemsize * 2 * world_size / 2**20
    return "one-shot" if mebibytes <= _ONE_SHOT_MEBIBYTES[world_size] else "two-shot"


def programmatic(version: Version) -> bool:
    """True if a launch may begin before the kernel ahead has ended, and read nothing too early."""
    return version >= SOUND


def _text(version: Version) -> str:
    major, minor, patch, post = version
    return f"{major}.{minor}.{patch}" + (f".post{post}" if post else "")

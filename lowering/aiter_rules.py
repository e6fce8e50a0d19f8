"""Which sites AITER's all_reduce + add + RMSNorm may take: pure functions of equal facts.

AITER is AMD's library of kernels. It adds up in fp32 in rank order and rounds, then adds the
residual. The norm is of the sum before that is rounded to the new residual, and is rounded once,
after the weight: within an ulp of the contract, not of its bits. Nothing of it has been run by
this project; the signatures are those of its sources. Its waits have no time limit.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from fx_fusion.lowering.site_form import SiteForm, plain_form_cause

#: Ranks that the fused kernels are compiled for (the library itself takes 6 as well).
WORLD_SIZES: Final = (2, 4, 8)
#: Bytes of x up to which its one kernel is taken rather than its two, if the ranks say nothing else.
ONE_STAGE_BYTES: Final = 131072
#: Bytes of x that it takes at most, inclusive.
MAX_BYTES: Final = 64 * 2**20
_VECTOR_BYTES: Final = 16
#: Vectors of a row: at most for one kernel, from and to for two.
_ONE_STAGE_VECTORS: Final = 1024
_TWO_STAGE_VECTORS: Final = (64, 2048)


class Release(NamedTuple):
    """What is installed; the same on all ranks.

    Attributes:
        version: As its package says, "" if it has none.
        chooses_stage: Its call takes `use_1stage`. A release without it (0.1.7, the one on PyPI)
            adds the residual before the sum over ranks is rounded.
        one_plus_weight: Its call takes `gemma_norm`, a weight of 1 + w.
        one_stage_bytes: Up to where one kernel is taken.
    """

    version: str
    chooses_stage: bool
    one_plus_weight: bool
    one_stage_bytes: int = ONE_STAGE_BYTES


def cause(
    release: Release | None,
    arch: str,
    world_size: int,
    dtype: torch.dtype,
    hidden_size: int,
    form: SiteForm | None,
) -> str:
    """Why AITER takes no call of a site; "" if it takes some. See `flashinfer_rules.cause`."""
    if not arch.startswith("gfx9"):
        return f"AITER's fused kernels are for AMD's gfx9, not {arch}"
    if world_size not in WORLD_SIZES:
        sizes = ", ".join(map(str, WORLD_SIZES))
        return f"AITER's fused kernels take {sizes} ranks, not {world_size}"
    vectors, rest = divmod(hidden_size * dtype.itemsize, _VECTOR_BYTES)
    if rest or not 0 < vectors <= _TWO_STAGE_VECTORS[1]:
        most = _TWO_STAGE_VECTORS[1] * _VECTOR_BYTES
        return (
            f"AITER's fused kernels take rows of whole 16 bytes up to {most}, not"
            f" {hidden_size * dtype.itemsize}"
        )
    if form is not None and (found := plain_form_cause(form, dtype)):
        return f"AITER's kernel can't give these numbers: {found}"
    if release is None:
        return ""
    if not release.chooses_stage:
        return (
            f"AITER {release.version} adds the residual before it rounds the sum over ranks;"
            " install a release whose fused_ar_rms takes use_1stage"
        )
    if form is not None and form.weight_form == "1+w" and not release.one_plus_weight:
        return f"AITER {release.version} has no weight of 1 + w"
    return ""


def algorithm(
    release: Release, world_size: int, dtype: torch.dtype, hidden_size: int, tokens: int
) -> str:
    """How a call runs: "one-stage", "two-stage", or "" where it has to take the unfused path.

    Two kernels give each rank an equal share of all vectors and leave a remainder out, so then
    there may be none.
    """
    size = tokens * hidden_size * dtype.itemsize
    if not 0 < size <= MAX_BYTES:
        return ""
    vectors = hidden_size * dtype.itemsize // _VECTOR_BYTES
    if size <= release.one_stage_bytes and vectors <= _ONE_STAGE_VECTORS:
        return "one-stage"
    least, most = _TWO_STAGE_VECTORS
    shared_out = tokens * vectors % world_size == 0
    return "two-stage" if least <= vectors <= most and shared_out else ""

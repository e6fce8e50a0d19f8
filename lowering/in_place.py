"""The op that writes the hidden state over the residual, as the dispatcher runs it.

It is on the path of the op that leaves the residual alone, and gives the same bits. Our kernels
write to the residual itself: a thread has read its elements of it before it writes them, and
reads no other thread's. What runs elsewhere is copied.
"""

from __future__ import annotations

import torch.distributed as dist

from fx_fusion.lowering import dispatch
from fx_fusion.lowering.arguments import (
    Arguments,
    Results,
    empty_results,
    is_aligned,
    result_dtypes,
)


def check(arguments: Arguments) -> None:
    """Raise ValueError unless the hidden state is wanted and fits where the residual is."""
    residual = arguments.residual
    _, hidden_dtype = result_dtypes(arguments)
    if residual is None or not arguments.want_residual:
        raise ValueError(
            "want_residual=False: what is written to the residual is the hidden state; give"
            " want_residual=True, or call all_reduce_add_rms_norm."
        )
    if residual.dtype != hidden_dtype:
        raise ValueError(
            f"residual is {residual.dtype} and the hidden state {hidden_dtype}, which can't be"
            f" written to it; cast it to {hidden_dtype}, or call all_reduce_add_rms_norm."
        )


def run(arguments: Arguments, group: dist.ProcessGroup) -> Results:
    """Run one call; the hidden state is in the residual, its own result is empty.

    Args:
        arguments: The op's, as `check` wants them; no other tensor shares the residual's memory.
        group: The group that they name.
    """
    residual = arguments.residual
    assert residual is not None
    given = None
    if residual.is_contiguous() and is_aligned(residual):
        # layout is a local fact: it costs a copy, and chooses no other path
        given = empty_results(arguments._replace(want_residual=False))
        given = given._replace(residual=residual)
    made = dispatch.run(arguments, group, given)
    if made.residual is not residual:
        residual.copy_(made.residual)
    return made._replace(residual=residual.new_empty(0))

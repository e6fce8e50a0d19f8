"""The unfused path: the group's own collective, then add and norm, line by line as in eager.

It runs for every device, group, size and layout, so it is what every kernel falls back on,
and what defines the numbers that a kernel must give.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fx_fusion.lowering.arguments import Arguments, Results


def run(
    arguments: Arguments,
    group: dist.ProcessGroup,
    results: Results | None = None,
    *,
    may_overwrite_x: bool = False,
) -> Results:
    """Reduce over `group`, then add and normalise.

    On a GPU the lines after the all_reduce are one kernel of our own where it can be had.

    Layout is a local fact, so it must steer nothing: x and residual are copied where they
    aren't contiguous, and ranks with other layouts still sum and round alike.

    Args:
        arguments: The op's.
        group: The one that they name, of the size that they name.
        results: Where results may be written; None, or None for one of them, for new tensors.
        may_overwrite_x: x may hold the sum afterwards, which saves a copy of it.

    Returns:
        Contiguous tensors: new ones, those of `results`, or x as the reduced value.
    """
    reduced = reduce(arguments, group, may_overwrite_x=may_overwrite_x)
    return add_and_norm(reduced, arguments, results)


def add_and_norm(
    reduced: torch.Tensor, arguments: Arguments, results: Results | None = None
) -> Results:
    """What follows the all_reduce, as `run` does it.

    `reduced` is contiguous, of x's shape and dtype; `arguments.x` isn't looked at.
    """
    if reduced.is_cuda and reduced.numel():
        from fx_fusion.lowering import gpu_local

        made = gpu_local.run(reduced, arguments, results)
        if made is not None:
            return made
    hidden = _hidden_state(reduced, arguments)
    norm, rstd = _norm(hidden, arguments)
    if hidden is reduced and arguments.want_residual and arguments.want_reduced:
        hidden = reduced.clone()
    return Results(
        norm if arguments.want_norm else norm.new_empty(0),
        hidden if arguments.want_residual else hidden.new_empty(0),
        reduced if arguments.want_reduced else reduced.new_empty(0),
        rstd if arguments.want_rstd else rstd.new_empty(0),
    )


def reduce(
    arguments: Arguments, group: dist.ProcessGroup, *, may_overwrite_x: bool = False
) -> torch.Tensor:
    """The sum over ranks in x's dtype, contiguous, in x if that may be or in a new tensor."""
    x = arguments.x.contiguous()
    if x.numel() == 0:
        # The number of tokens is the same on all ranks, so all of them leave here.
        return torch.empty_like(x)
    if arguments.deterministic:
        return _sum_in_rank_order(x, group)
    collectives = torch.ops._c10d_functional
    in_place = may_overwrite_x or x is not arguments.x
    # overloads by name: choosing one costs the host as much as a launch
    all_reduce = collectives.all_reduce_ if in_place else collectives.all_reduce
    result: torch.Tensor = collectives.wait_tensor.default(
        all_reduce.default(x, "sum", arguments.group_name)
    )
    return result


def _sum_in_rank_order(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, in fp32, in rank order, from +0.0, rounded once to x's dtype."""
    # Not the functional all_gather: over gloo with GPU tensors it crashed (torch 2.11). Not
    # all_gather_into_tensor: its name changes (2.13).
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in parts:
        total += part
    return total.to(x.dtype)


def _hidden_state(reduced: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """What is normed: `reduced` itself where no step changes it."""
    hidden = reduced if arguments.add_dtype is None else reduced.to(arguments.add_dtype)
    if arguments.bias is not None:
        hidden = hidden + arguments.bias
    if arguments.scale_tensor is not None:
        # in fp32 on every device, as eager multiplies by a float; a GPU would round a 0-d
        # tensor to the other operand's dtype first
        hidden = (hidden.float() * arguments.scale_tensor.float()).to(hidden.dtype)
    elif arguments.scale != 1.0:
        hidden = hidden * arguments.scale
    if arguments.residual is not None:
        hidden = arguments.residual.contiguous() + hidden
    return hidden


def _norm(hidden: torch.Tensor, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm and the reciprocal root; whichever isn't wanted is an empty tensor."""
    out_dtype = arguments.out_dtype or hidden.dtype
    norm = hidden.new_empty(0, dtype=out_dtype)
    rstd = hidden.new_empty(0, dtype=torch.float32)
    if not (arguments.want_norm or arguments.want_rstd):
        return norm, rstd
    hidden32 = hidden.float()
    mean_square = hidden32.pow(2).mean(-1, keepdim=True)
    mean_square = mean_square + (
        arguments.eps if arguments.eps_tensor is None else arguments.eps_tensor
    )
    if arguments.reciprocal == "pow":
        rstd = mean_square.pow(-0.5)
    elif arguments.reciprocal == "1/sqrt":
        rstd = mean_square.sqrt().reciprocal()
    else:
        rstd = mean_square.rsqrt()
    if not arguments.want_norm:
        return norm, rstd
    if arguments.reciprocal == "sqrt":
        norm = hidden32 / mean_square.sqrt()
    else:
        norm = hidden32 * rstd
    if arguments.norm_dtype is not None:
        norm = norm.to(arguments.norm_dtype)
    if arguments.weight is not None:
        weight = arguments.weight
        norm = norm * (weight if arguments.weight_form == "w" else 1 + weight.float())
    return norm.to(out_dtype), rstd

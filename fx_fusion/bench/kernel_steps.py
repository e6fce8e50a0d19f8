"""The candidates of the kernels benchmark, each as a function of one site's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fx_fusion.ops import all_reduce_add_rms_norm

EPS: Final = 1e-6
#: x, residual, weight -> norm, new residual.
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
#: x -> its sum over the ranks.
Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    """One way through a site.

    Attributes:
        step: From (x, residual, weight) to (norm, new residual).
        prepare: Called with x where the step reads x from elsewhere; then every step of a graph
            reduces the same x.
        warm_up: It has to run before it is captured.
        chained: A graph's steps take the residual of the one before; else all take the first.
        exact: It adds up over ranks in fp32 in rank order, so its residual has no slack.
        foreign: Another library's kernel, which is timed even if its results are wrong.
    """

    step: Step
    prepare: Callable[[torch.Tensor], object] | None = None
    warm_up: bool = False
    chained: bool = True
    exact: bool = False
    foreign: bool = False


def add_rms_norm(
    reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows the all_reduce in a model, for Inductor to compile."""
    hidden = reduced + residual
    hidden32 = hidden.float()
    normed = hidden32 * torch.rsqrt(hidden32.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(hidden.dtype), hidden


def fused(group: dist.ProcessGroup, plan: str) -> Step:
    """The op with this `plan`."""
    name, size = str(group.group_name), group.size()

    def step(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, hidden, _, _ = all_reduce_add_rms_norm(
            x,
            residual,
            weight,
            None,
            EPS,
            name,
            size,
            norm_dtype=x.dtype,
            want_residual=True,
            plan=plan,
        )
        return norm, hidden

    return step


def unfused(reduce: Reduce, norm: Step) -> Step:
    """An all_reduce, then the compiled norm."""

    def step(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm(reduce(x), residual, weight)

    return step


def own_all_reduce(group: dist.ProcessGroup, plan: str) -> Reduce:
    """The op as an all_reduce alone: what the protocol gains without fusion."""
    name, size = str(group.group_name), group.size()

    def reduce(x: torch.Tensor) -> torch.Tensor:
        results = all_reduce_add_rms_norm(
            x,
            None,
            None,
            None,
            EPS,
            name,
            size,
            weight_form="none",
            want_norm=False,
            want_reduced=True,
            plan=plan,
        )
        return cast(torch.Tensor, results[2])

    return reduce


def copied_one_shot(shared: torch.Tensor, name: str) -> Reduce:
    """x copied into symmetric memory, then torch's one-shot over the group of this name."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        shared.copy_(x)
        return cast(torch.Tensor, _symmetric().one_shot_all_reduce(shared, "sum", name))

    return reduce


def one_shot_in_place(shared: torch.Tensor, name: str) -> Reduce:
    """torch's one-shot of what lies in symmetric memory already, whatever x is."""

    def reduce(_: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, _symmetric().one_shot_all_reduce(shared, "sum", name))

    return reduce


def one_shot_that_copies(shared: torch.Tensor, name: str) -> Reduce:
    """torch's one-shot whose kernel copies x into symmetric memory itself."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        reduced = _symmetric().one_shot_all_reduce_copy(shared, x, "sum", name)
        return cast(torch.Tensor, reduced)

    return reduce


def copied_two_shot(shared: torch.Tensor, name: str) -> Reduce:
    """x copied into symmetric memory, then torch's two-shot."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        shared.copy_(x)
        reduced = torch.empty_like(x)
        _symmetric().two_shot_all_reduce_out(shared, "sum", name, reduced)
        return reduced

    return reduce


def group_all_reduce(group: dist.ProcessGroup) -> Reduce:
    """The group's own all_reduce, of a copy: x belongs to the model."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        reduced = x.clone()
        dist.all_reduce(reduced, group=group)
        return reduced

    return reduce


def _symmetric() -> Any:
    return torch.ops.symm_mem

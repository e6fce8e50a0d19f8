"""Cases: user-level code with the outcome wanted, and what they are made of.

A case is made for the groups and the rank at hand, so the same code is looked at under a fake
group and run on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from fx_fusion.report import Reason
from fx_fusion.testing import fake_group

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
#: Tokens and hidden size of the inputs, unless a case needs others.
TOKENS, HIDDEN = 8, 64

Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Groups:
    """The process groups of a case.

    Attributes:
        tp: This rank's group of two, to reduce over.
        across: In a world of four, the group of two that crosses it; else `tp` again.
        alone: A group of this rank only.
    """

    tp: dist.ProcessGroup
    across: dist.ProcessGroup
    alone: dist.ProcessGroup


def make_groups(rank: int, world_size: int) -> Groups:
    """Split the default group; every rank calls this."""

    def own(parts: list[list[int]]) -> dist.ProcessGroup:
        made: list[dist.ProcessGroup] = [dist.new_group(part) for part in parts]
        return next(group for group, part in zip(made, parts, strict=True) if rank in part)

    alone = own([[r] for r in range(world_size)])
    if world_size == 2:
        tp = own([[0, 1]])
        return Groups(tp, tp, alone)
    return Groups(own([[0, 1], [2, 3]]), own([[0, 2], [1, 3]]), alone)


@contextmanager
def fake_groups() -> Iterator[Groups]:
    """The groups of a fake world of four, seen from rank 0."""
    with fake_group(4):
        yield make_groups(0, 4)


@dataclass(frozen=True)
class Case:
    """Code, and what should become of it.

    Attributes:
        report: The public bug report, or the model, that has this graph.
        make: Gives the function and its arguments for the groups and a rank.
        fused: How many sites fuse.
        reasons: Why the others don't, in program order.
        outputs: What each output is: "n" a norm's result (one unit in the last place may
            differ), "h" a hidden state or reduced value (bitwise), "-" computed from norms.
        world_size: Ranks to run it on.
        train: Compute gradients too.
        dynamic: False where symbolic sizes change the outcome.
        inductor: On real ranks, generate code for it; False runs its graph op by op.
    """

    name: str
    report: str
    make: Callable[[Groups, int], Made]
    fused: int
    reasons: tuple[Reason, ...] = ()
    outputs: str = "nh"
    world_size: int = 2
    train: bool = False
    dynamic: bool = True
    inductor: bool = True


CASES: dict[str, Case] = {}


def case(
    report: str, *, fused: int, reasons: tuple[Reason, ...] = (), **facts: Any
) -> Callable[[Callable[[Groups, int], Made]], Callable[[Groups, int], Made]]:
    """Register a function that makes a case under its name."""

    def decorate(make: Callable[[Groups, int], Made]) -> Callable[[Groups, int], Made]:
        name = make.__name__
        assert name not in CASES
        CASES[name] = Case(name, report, make, fused, reasons, **facts)
        return make

    return decorate


def part(
    rank: int, *shape: int, dtype: torch.dtype = BF16, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """A partial sum: another one on each rank."""
    generator = torch.Generator().manual_seed(1000 * (rank + 1) + seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def shared(
    *shape: int, dtype: torch.dtype = BF16, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """A tensor that is equal on all ranks: a residual, a bias, a matrix."""
    generator = torch.Generator().manual_seed(7 + seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def weight(size: int = HIDDEN, *, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """A norm's weight, around 1."""
    return (1 + 0.1 * shared(size, dtype=FP32, seed=90 + seed)).to(dtype)


def all_reduce(
    x: torch.Tensor, group: dist.ProcessGroup | Any, op: str = "sum"
) -> torch.Tensor:
    """The sum over the group's ranks, as functional collectives give it."""
    return cast(torch.Tensor, funcol.all_reduce(x, op, group))


def rms_norm(h: torch.Tensor, w: torch.Tensor, eps: Any = 1e-6) -> torch.Tensor:
    """Llama's: round to h's dtype, then multiply by the weight."""
    h32 = h.float()
    normed = h32 * torch.rsqrt(h32.pow(2).mean(-1, keepdim=True) + eps)
    return w * normed.to(h.dtype)


def rms_norm_late_cast(h: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """OLMo2's and gpt-oss': multiply by the weight in fp32, then round."""
    h32 = h.float()
    normed = h32 * torch.rsqrt(h32.pow(2).mean(-1, keepdim=True) + eps)
    return (w * normed).to(h.dtype)


def rms_norm_gemma(h: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Gemma's: multiply by 1 + weight in fp32, then round."""
    h32 = h.float()
    normed = h32 * torch.rsqrt(h32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + w.float())).to(h.dtype)


class Usual(nn.Module):
    """Norms `hidden(*inputs)`; returns the norm and the hidden state."""

    w: torch.Tensor

    def __init__(
        self,
        hidden: Callable[..., torch.Tensor],
        norm: Callable[..., torch.Tensor],
        w: torch.Tensor,
    ) -> None:
        super().__init__()
        self.hidden, self.norm = hidden, norm
        self.register_buffer("w", w)  # of a module, so its size is static with dynamic=True

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.hidden(*inputs)
        return self.norm(h, self.w), h


def usual(
    hidden: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    norm: Callable[..., torch.Tensor] = rms_norm,
    w: torch.Tensor | None = None,
) -> Made:
    """A case that norms `hidden(*inputs)` and returns the norm and the hidden state."""
    return Usual(hidden, norm, weight() if w is None else w), inputs

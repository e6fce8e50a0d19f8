"""Which candidates the kernels benchmark compares, and what they keep for a whole run.

A candidate that can't be made, or can't run at a size, is left out on all ranks alike and named
with its cause; it never hides the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fx_fusion.bench import kernel_flashinfer as flashinfer
from fx_fusion.bench import kernel_links as links
from fx_fusion.bench import kernel_steps as steps
from fx_fusion.bench.kernel_steps import Candidate, Reduce
from fx_fusion.lowering import select
from fx_fusion.settings import FusionSettings

OURS: Final = "fx_fusion"
#: Our kernel as it is written in Triton; only measured if it is asked for.
TRITON: Final = "Triton"
#: One algorithm of ours at every size, whatever `select` chooses: name and algorithm.
FORCED: Final = {
    "fx_fusion one-shot": "one-shot",
    "fx_fusion two-shot": "two-shot",
    TRITON: "triton",
}
#: The op planned with another setting of `kernel`, which may mean the group's own all_reduce and
#: then our kernel for add and norm: name and setting.
PLANNED: Final = {"fx_fusion auto": "auto", "fx_fusion unfused": "unfused"}
OWN_ALL_REDUCE: Final = "own all_reduce"
#: Those that would silently be something else where our kernels can't run.
OWN_KERNELS: Final = (OURS, *FORCED, OWN_ALL_REDUCE)
#: torch's all_reduces over symmetric memory: name, and what makes it from memory and group name.
SYMMETRIC: Final[dict[str, Callable[[torch.Tensor, str], Reduce]]] = {
    "unfused copy": steps.copied_one_shot,
    "unfused one kernel": steps.one_shot_that_copies,
    "unfused two-shot": steps.copied_two_shot,
    "unfused": steps.one_shot_in_place,
}
NCCL: Final = "nccl"
#: Every candidate, in the order in which they are shown.
NAMES: Final = (OURS, *FORCED, *PLANNED, OWN_ALL_REDUCE, *flashinfer.VARIANTS, *SYMMETRIC, NCCL)
#: Those that do without fusion, from an x that lies anywhere.
UNFUSED: Final = ("unfused copy", "unfused one kernel", "unfused two-shot", NCCL)
#: What each algorithm sends. The kernel that `select` chooses between two is not known here.
_TRAFFIC: Final[dict[str, Callable[[int, int, int], links.Traffic]]] = {
    "fx_fusion one-shot": links.push_one_shot,
    "fx_fusion two-shot": links.push_two_shot,
    TRITON: links.push_one_shot,
    "flashinfer one-shot": links.push_one_shot,
    "flashinfer one-shot pdl": links.push_one_shot,
    "flashinfer two-shot": links.flashinfer_two_shot,
    "flashinfer two-shot pdl": links.flashinfer_two_shot,
    "unfused copy": links.torch_one_shot,
    "unfused": links.torch_one_shot,
    "unfused one kernel": links.torch_one_shot,
    "unfused two-shot": links.torch_two_shot,
    NCCL: links.ring,
}


def traffic(name: str, tokens: int, row_bytes: int, world_size: int) -> links.Traffic | None:
    """What a candidate sends at a size; None where the size decides its algorithm."""
    count = _TRAFFIC.get(name)
    return None if count is None else count(tokens, row_bytes, world_size)


def plan_of(name: str) -> str:
    """The op's `plan` argument of one of our candidates."""
    if name in FORCED:
        return select.forced_plan(FORCED[name])
    return select.digest_of(FusionSettings(kernel=PLANNED.get(name, "fx_fusion")))


@dataclass
class Candidates:
    """What a run keeps from size to size, on one rank.

    Attributes:
        group: The process group.
        sizes: All sizes of the run: tokens and hidden size.
        dtype: Of x, residual and weight.
        names: The candidates that are wanted.
        shares_gpu: Several ranks run on one GPU.
        causes: Why a candidate is left out at every size; the same on every rank.
    """

    group: dist.ProcessGroup
    sizes: Sequence[tuple[int, int]]
    dtype: torch.dtype
    names: Sequence[str]
    shares_gpu: bool
    causes: dict[str, str] = field(default_factory=dict)
    _flashinfer: flashinfer.Workspace | None = None
    _shared: torch.Tensor | None = None

    def make(self) -> None:
        """Make the shared memory of all candidates; collective."""
        self._make_flashinfer()
        self._make_symmetric()

    def _make_flashinfer(self) -> None:
        wanted = [name for name in flashinfer.VARIANTS if self._wants(name)]
        fitting = [
            size
            for size in self.sizes
            if any(not self._flashinfer_cause(name, *size) for name in wanted)
        ]
        if not fitting:
            return
        module, cause = attempt(flashinfer.load)
        cause = agreed(self.group, cause)
        if not cause:
            made, cause = attempt(
                lambda: flashinfer.make_workspace(module, fitting, self.dtype, self.group)
            )
            cause = agreed(self.group, cause)
            self._flashinfer = None if cause else made
        if cause:
            self.causes.update(dict.fromkeys(wanted, cause))

    def _make_symmetric(self) -> None:
        wanted = [name for name in SYMMETRIC if self._wants(name)]
        if not wanted:
            return
        if self.dtype == torch.float16:
            self.causes.update(dict.fromkeys(wanted, "torch's op takes no float16"))
            return
        made, cause = attempt(self._symmetric_memory)
        cause = agreed(self.group, cause)
        self._shared = None if cause else made
        if cause:
            self.causes.update(dict.fromkeys(wanted, cause))

    def _symmetric_memory(self) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory

        elements = max(tokens * hidden_size for tokens, hidden_size in self.sizes)
        shared: torch.Tensor = cast(Any, symmetric_memory).empty(
            elements, dtype=self.dtype, device="cuda"
        )
        cast(Any, symmetric_memory).rendezvous(shared, str(self.group.group_name))
        return shared

    def _wants(self, name: str) -> bool:
        return name in self.names and name not in self.causes

    def _flashinfer_cause(self, name: str, tokens: int, hidden_size: int) -> str:
        return flashinfer.cell_cause(
            flashinfer.VARIANTS[name][0],
            self.group.size(),
            tokens,
            hidden_size,
            self.dtype.itemsize,
            self.shares_gpu,
        )

    def cause_at(self, name: str, tokens: int, hidden_size: int) -> str:
        """Why a candidate isn't run at a size, "" if it is; the same on every rank."""
        if name in self.causes:
            return self.causes[name]
        if name in flashinfer.VARIANTS:
            return self._flashinfer_cause(name, tokens, hidden_size)
        if name in (NCCL, *PLANNED) and "nccl" not in str(
            cast(Any, dist).get_backend(self.group)
        ):
            return "the ranks share a GPU, which NCCL refuses, and gloo can't be captured"
        if name == TRITON and self.shares_gpu:
            return "its first call loads it, while the kernel of another rank waits on the same GPU"
        if name == "fx_fusion two-shot" and self.group.size() == 2:
            return "with two ranks it sends as much as one-shot"
        if name == "unfused two-shot" and self.group.size() not in (2, 4, 8):
            return f"torch has no two-shot for {self.group.size()} ranks"
        return ""

    def at(self, tokens: int, hidden_size: int) -> Iterator[tuple[str, Candidate]]:
        """The candidates of one size; each is first run when every rank has all of them."""
        for name in NAMES:
            if name in self.names and not self.cause_at(name, tokens, hidden_size):
                yield name, self._candidate(name, tokens, hidden_size)

    def _candidate(self, name: str, tokens: int, hidden_size: int) -> Candidate:
        if name == OURS or name in FORCED:
            # Triton loads a kernel when it is first called, which can't be captured.
            step = steps.fused(self.group, plan_of(name))
            return Candidate(step, exact=True, warm_up=name == TRITON)
        if name in PLANNED:
            return Candidate(steps.fused(self.group, plan_of(name)), warm_up=True)
        if name in flashinfer.VARIANTS:
            assert self._flashinfer is not None
            one_shot, programmatic = flashinfer.VARIANTS[name]
            return Candidate(
                self._flashinfer.step(one_shot, programmatic),
                # It reads the residual before it waits for the kernel ahead (before 0.7.1).
                chained=not programmatic,
                exact=True,
                foreign=True,
            )
        norm = torch.compile(steps.add_rms_norm, dynamic=False)
        if name == OWN_ALL_REDUCE:
            reduce = steps.own_all_reduce(self.group, plan_of(name))
            return Candidate(steps.unfused(reduce, norm), exact=True)
        if name == NCCL:
            reduce = steps.group_all_reduce(self.group)
            # NCCL connects the ranks when it is first used, which can't be captured.
            return Candidate(steps.unfused(reduce, norm), warm_up=True)
        assert self._shared is not None
        shared = self._shared[: tokens * hidden_size].view(tokens, hidden_size)
        reduce = SYMMETRIC[name](shared, str(self.group.group_name))
        in_place = name == "unfused"
        prepare = functools.partial(shared.copy_) if in_place else None
        return Candidate(steps.unfused(reduce, norm), prepare=prepare)


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """What `make` returns, and "" or the first line of what it raised."""
    try:
        return make(), ""
    except Exception as error:  # another library's: whatever it is, the others go on
        lines = [line for line in str(error).splitlines() if line.strip()]
        return None, f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def agreed(group: dist.ProcessGroup, cause: str) -> str:
    """The causes of all ranks as one text, the same on every rank; "" if no rank has one.

    One text that all ranks have stands once.
    """
    gathered: list[Any] = [None] * group.size()
    cast(Any, dist).all_gather_object(gathered, cause, group=group)
    if len(set(gathered)) == 1:
        return str(gathered[0])
    found = [f"rank {rank}: {text}" for rank, text in enumerate(gathered) if text]
    return "; ".join(found)

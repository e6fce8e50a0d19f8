"""What the kernels benchmark compares: each candidate as a function of one site's inputs.

A candidate that can't be made, or can't run at a size, is left out on all ranks alike and named
with its cause; it never hides the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fx_fusion.bench import kernel_flashinfer as flashinfer
from fx_fusion.lowering.select import digest_of
from fx_fusion.ops import all_reduce_add_rms_norm
from fx_fusion.settings import FusionSettings

EPS: Final = 1e-6
#: x, residual, weight -> norm, new residual.
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
OURS: Final = "fx_fusion"
#: Every candidate, in the order in which they are shown.
NAMES: Final = (
    OURS,
    "own all_reduce",
    *flashinfer.VARIANTS,
    "unfused copy",
    "unfused",
    "unfused one kernel",
    "unfused two-shot",
    "nccl",
)
#: Those that do without fusion, from an x that lies anywhere.
UNFUSED: Final = ("unfused copy", "unfused one kernel", "unfused two-shot", "nccl")


@dataclass(frozen=True)
class Candidate:
    """One way through a site.

    Attributes:
        step: From (x, residual, weight) to (norm, new residual).
        prepare: Called with x where the step reads x from elsewhere; then every step of a graph
            reduces the same x.
        warm_up: It has to run before it is captured.
    """

    step: Step
    prepare: Callable[[torch.Tensor], object] | None = None
    warm_up: bool = False


def add_rms_norm(
    reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows the all_reduce in a model, for Inductor to compile."""
    hidden = reduced + residual
    hidden32 = hidden.float()
    normed = hidden32 * torch.rsqrt(hidden32.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(hidden.dtype), hidden


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
        wanted = [name for name in NAMES if name.startswith("unfused") and self._wants(name)]
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
        if name == "nccl" and "nccl" not in str(cast(Any, dist).get_backend(self.group)):
            return "the ranks share a GPU, which NCCL refuses"
        if name == "unfused two-shot":
            step = self.group.size() * 16 // self.dtype.itemsize
            if tokens * hidden_size % step:
                return f"torch's two-shot takes multiples of {step} elements"
        return ""

    def at(self, tokens: int, hidden_size: int) -> Iterator[tuple[str, Candidate]]:
        """The candidates of one size; a step is first called when every rank has all of them."""
        norm = torch.compile(add_rms_norm, dynamic=False)
        makers = self._makers(tokens, hidden_size, norm)
        for name in NAMES:
            if name in self.names and not self.cause_at(name, tokens, hidden_size):
                yield name, makers[name]()

    def _makers(
        self, tokens: int, hidden_size: int, norm: Step
    ) -> dict[str, Callable[[], Candidate]]:
        group, name = self.group, str(self.group.group_name)
        symmetric = torch.ops.symm_mem

        def shared() -> torch.Tensor:
            assert self._shared is not None
            return self._shared[: tokens * hidden_size].view(tokens, hidden_size)

        def copied() -> Candidate:
            buffer = shared()

            def step(
                x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                buffer.copy_(x)
                reduced = symmetric.one_shot_all_reduce(buffer, "sum", name)
                return norm(reduced, residual, weight)

            return Candidate(step)

        def in_place() -> Candidate:
            buffer = shared()

            def step(
                _: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                reduced = symmetric.one_shot_all_reduce(buffer, "sum", name)
                return norm(reduced, residual, weight)

            return Candidate(step, prepare=buffer.copy_)

        def one_kernel() -> Candidate:
            buffer = shared()

            def step(
                x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                reduced = symmetric.one_shot_all_reduce_copy(buffer, x, "sum", name)
                return norm(reduced, residual, weight)

            return Candidate(step)

        def two_shot() -> Candidate:
            buffer = shared()

            def step(
                x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                buffer.copy_(x)
                reduced = torch.empty_like(x)
                symmetric.two_shot_all_reduce_out(buffer, "sum", name, reduced)
                return norm(reduced, residual, weight)

            return Candidate(step)

        def nccl() -> Candidate:
            def step(
                x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                reduced = x.clone()
                dist.all_reduce(reduced, group=group)
                return norm(reduced, residual, weight)

            return Candidate(step, warm_up=True)  # NCCL connects the ranks when first used

        made: dict[str, Callable[[], Candidate]] = {
            OURS: lambda: Candidate(fused(group, "fx_fusion")),
            "own all_reduce": lambda: Candidate(own_all_reduce(group, norm)),
            "unfused copy": copied,
            "unfused": in_place,
            "unfused one kernel": one_kernel,
            "unfused two-shot": two_shot,
            "nccl": nccl,
        }
        if self._flashinfer is not None:
            for variant, (one_shot, programmatic) in flashinfer.VARIANTS.items():
                step = self._flashinfer.step(one_shot, programmatic)
                made[variant] = lambda step=step: Candidate(step)  # type: ignore[misc]
        return made


def fused(group: dist.ProcessGroup, kernel: str) -> Step:
    """The op, planned with this setting of `kernel`."""
    name, size = str(group.group_name), group.size()
    plan = digest_of(FusionSettings(kernel=cast(Any, kernel)))

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


def own_all_reduce(group: dist.ProcessGroup, norm: Step) -> Step:
    """The op as an all_reduce alone, then the compiled norm: what the protocol gains by itself."""
    name, size = str(group.group_name), group.size()
    plan = digest_of(FusionSettings(kernel="fx_fusion"))

    def step(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reduced = all_reduce_add_rms_norm(
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
        )[2]
        return norm(reduced, residual, weight)

    return step


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """What `make` returns, and "" or the first line of what it raised."""
    try:
        return make(), ""
    except Exception as error:  # another library's: whatever it is, the others go on
        lines = [line for line in str(error).splitlines() if line.strip()]
        return None, f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def agreed(group: dist.ProcessGroup, cause: str) -> str:
    """The causes of all ranks as one text, the same on every rank; "" if no rank has one."""
    gathered: list[Any] = [None] * group.size()
    cast(Any, dist).all_gather_object(gathered, cause, group=group)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(gathered) if text]
    return "; ".join(found)

"""What the ranks of the tests of compiled models run; each returns a list of what was wrong."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor.utils import run_and_get_code

import fx_fusion
from fx_fusion.lowering import gpu_site
from fx_fusion.lowering.gpu_workspace import GpuWorkspace, gpu_workspace

HIDDEN, INNER, LAYERS = 2880, 1440, 2
SITES = 2 * LAYERS
BF16 = torch.bfloat16
#: Of the largest output: bf16 through two layers, whose GEMMs other kernels may compute.
CLOSE = 0.03
cuda: Any = torch.cuda
next_step: Any = torch.compiler.cudagraph_mark_step_begin


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, funcol).all_reduce(x, "sum", dist.group.WORLD))


class Layers(torch.nn.Module):
    """Blocks of a tensor-parallel model: two row-parallel projections, each before a norm.

    Attributes:
        norms_input: There is a norm of the input, the only one that isn't part of a site.
    """

    norms_input = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        own = torch.Generator(device="cuda").manual_seed(100 + rank)

        def matrix(rows: int, columns: int) -> torch.nn.Parameter:
            value = torch.randn(rows, columns, generator=own, device="cuda") / rows**0.5
            return torch.nn.Parameter(value.to(BF16), requires_grad=False)

        for name in ("first", "up", "down"):
            shape = (INNER, HIDDEN) if name == "down" else (HIDDEN, INNER)
            matrices = [matrix(*shape) for _ in range(LAYERS)]
            setattr(self, name, torch.nn.ParameterList(matrices))
        self.second = torch.nn.ParameterList([matrix(INNER, HIDDEN) for _ in range(LAYERS)])
        same = torch.Generator(device="cuda").manual_seed(7)
        weight = torch.rand(HIDDEN, generator=same, device="cuda") + 0.5
        self.weight = torch.nn.Parameter(weight.to(BF16), requires_grad=False)

    def norm(self, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(h, (HIDDEN,), self.weight, 1e-6)

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = self.norm(h) if self.norms_input else h
        for layer in range(LAYERS):
            first, second = cast(Any, self.first)[layer], cast(Any, self.second)[layer]
            up, down = cast(Any, self.up)[layer], cast(Any, self.down)[layer]
            h = h + all_reduce(torch.tanh(n @ first) @ second)
            n = self.norm(h)
            h = h + all_reduce(torch.nn.functional.silu(n @ up) @ down)
            n = self.norm(h)
        return n, h


@functools.cache
def meeting() -> Any:
    """A group of the same ranks that meets on the host, whatever the model's group runs on."""
    return dist.new_group(backend="gloo")


def meet() -> None:
    """Wait for the other ranks, on the host."""
    dist.barrier(meeting())


def hidden_states(tokens: int, call: int) -> torch.Tensor:
    """The model's input, the same on all ranks, another for each call."""
    same = torch.Generator(device="cuda").manual_seed(1000 + call)
    return torch.randn(tokens, HIDDEN, generator=same, device="cuda").to(BF16)


def workspace_now(seconds: float = 20.0) -> GpuWorkspace:
    """The group's workspace, which gives up soon, with the kernels that the model needs."""
    group = dist.group.WORLD
    assert group is not None
    workspace = gpu_workspace(group, torch.device("cuda", torch.cuda.current_device()))
    assert workspace.usable, workspace.refusal
    workspace.timeout_nanoseconds = int(seconds * 1e9)
    if workspace.sharers > 1:
        workspace.block_limit = max(8, workspace.multiprocessors // 2)
    assert fx_fusion.prepare(max_tokens=64, hidden_size=HIDDEN, dtype=BF16)
    return workspace


@contextlib.contextmanager
def unfused(workspace: GpuWorkspace) -> Iterator[None]:
    """Let the op take the unfused path for a while, on all ranks.

    Ranks that share a GPU can't load kernels while another rank's kernel waits for them, so
    what was compiled is run once without such a kernel.
    """
    meet()
    workspace.refusal = "the first call only loads kernels"
    try:
        yield
        torch.cuda.synchronize()
    finally:
        workspace.refusal = ""
    meet()


@contextlib.contextmanager
def graphs_of_all_ranks() -> Iterator[list[int]]:
    """No rank replays a graph that another hasn't captured yet; counts the captures."""
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    record = cast(Any, CUDAGraphNode)._record
    captures = [0]

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = record(*args, **kwargs)
        captures[0] += 1
        meet()
        return result

    with mock.patch.object(CUDAGraphNode, "_record", recorded):
        yield captures


@contextlib.contextmanager
def calls_of_python() -> Iterator[list[int]]:
    """Counts the calls of sites that the launcher in C left to Python; keeps no argument."""
    original = gpu_site.GpuSite._run
    count = [0]

    def counted(site: gpu_site.GpuSite, *args: Any) -> None:
        count[0] += 1
        original(site, *args)

    with mock.patch.object(gpu_site.GpuSite, "_run", counted):
        yield count


def differs_between_ranks(value: torch.Tensor) -> bool:
    mine = value.contiguous().view(torch.uint8).cpu()
    gathered: list[Any] = [None] * dist.get_world_size()
    cast(Any, dist).all_gather_object(gathered, mine, group=meeting())
    return any(not torch.equal(other, mine) for other in gathered)


def far_from_eager(model: Layers, h: torch.Tensor, given: Any) -> list[str]:
    """Where results are further from eager's than rounding explains."""
    wrong = []
    for name, one, two in zip(("norm", "hidden state"), given, model(h), strict=True):
        off = float((one.float() - two.float()).abs().max() / two.float().abs().max())
        if not off <= CLOSE:
            wrong.append(f"{name} of {len(h)} tokens is off by {off:.3f}")
    return wrong


def wrong_code(code: str) -> list[str]:
    """What generated code holds that it shouldn't, or lacks."""
    lines = [line for line in code.splitlines() if not line.lstrip().startswith(("#", "//"))]
    body = "\n".join(lines)
    wrong = []
    if re.search(r"torch\.ops\.fx_fusion|fx_fusion::all_reduce", body):
        wrong.append("the op is called through the dispatcher")
    if re.search(r"all_reduce_?\.default\(|c10d_functional_all_reduce|one_shot_all_", body):
        wrong.append("an all_reduce is left")
    sites = len(re.findall(r"fx_fusion_site_\w+\(get_raw_stream\(|fx_fusion_call\(&", body))
    return wrong if sites == SITES else [*wrong, f"{sites} sites are called"]


def is_in_a_pool(workspace: GpuWorkspace) -> bool:
    """True if the workspace lies in memory of torch's allocator, as graphs' pools do."""
    memory = workspace._memory
    assert memory is not None
    return any(
        segment["address"] <= memory.data_ptr() < segment["address"] + segment["total_size"]
        for segment in cuda.memory_snapshot()
    )


def events_of_the_op(compiled: Any, h: torch.Tensor) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(h)
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages() if "fx_fusion::" in event.key]


def compiled_model(
    rank: int, world_size: int, mode: str, sizes: tuple[int, ...], dynamic: bool, calls: int
) -> list[str]:
    """A model under one of Inductor's modes: its code, its results, call after call."""
    del world_size
    model = Layers(rank)
    workspace = workspace_now()
    options: dict[str, Any] = {
        "kernel": "fx_fusion",
        **({"cpp_wrapper": True} if mode == "cpp_wrapper" else {}),
        **({} if mode in ("default", "cpp_wrapper") else {"mode": mode}),
    }
    compiled = torch.compile(model, backend="fx_fusion", options=options, dynamic=dynamic)
    wrong: list[str] = []
    with torch.no_grad(), graphs_of_all_ranks() as captures:
        for number, tokens in enumerate(sizes):
            h = hidden_states(tokens, 0)
            with unfused(workspace):
                if number == 0:  # it resets Dynamo, so it is for the first call alone
                    _, codes = cast(Any, run_and_get_code)(compiled, h)
                    wrong += wrong_code(codes[0])
                else:
                    next_step()
                    compiled(h)
            for _ in range(3):
                next_step()
                given = [value.clone() for value in compiled(h)]
                torch.cuda.synchronize()
                meet()
            wrong += far_from_eager(model, h, given)
        made = captures[0]
        uses_graphs = mode in ("reduce-overhead", "max-autotune")
        if made < len(sizes) if uses_graphs else made:
            wrong.append(f"{made} captures for {len(sizes)} sizes")
        wrong += interleaved(model, compiled, sizes, calls)
        if captures[0] != made:
            wrong.append(f"{captures[0] - made} captures later on")
        wrong += events_of_the_op(compiled, hidden_states(sizes[-1], 3))
    workspace.check()
    if is_in_a_pool(workspace):
        wrong.append("the workspace lies in a pool of torch's allocator")
    return wrong


def interleaved(model: Layers, compiled: Any, sizes: tuple[int, ...], calls: int) -> list[str]:
    """Calls of all sizes in turn, with inputs that change; ranks end with the same bits."""
    wrong: list[str] = []
    bases = {tokens: hidden_states(tokens, 1) for tokens in sizes}
    sums = torch.zeros((), dtype=torch.int64, device="cuda")
    seen: dict[tuple[int, int], torch.Tensor] = {}
    with calls_of_python() as by_python:
        for call in range(calls):
            tokens = sizes[call % len(sizes)]
            kind = call // len(sizes) % 11
            h = bases[tokens].roll(kind, -1) * (1 + kind / 4)
            next_step()
            n, out = compiled(h)
            sums = 31 * sums + n.view(torch.int16).sum() + out.view(torch.int16).sum()
            if (tokens, kind) not in seen:
                seen[tokens, kind] = n.clone()
                if kind in (0, 7):
                    wrong += far_from_eager(model, h, (n, out))
            else:
                sums += 1_000_003 * (n != seen[tokens, kind]).sum()
            if call % 250 == 249:
                torch.cuda.synchronize()
                again = int((n != seen[tokens, kind]).sum())
                if again:
                    wrong.append(f"call {call}: {again} elements differ from an equal call's")
        if by_python[0]:
            wrong.append(f"{by_python[0]} calls were left to Python")
    torch.cuda.synchronize()
    if differs_between_ranks(sums.view(1)):
        wrong.append("the ranks' results differ")
    for value in seen.values():
        if differs_between_ranks(value):
            wrong.append("the ranks' results differ")
            break
    return wrong


def cold_first_call(rank: int, world_size: int, mode: str) -> list[str]:
    """Nothing is prepared: the first call makes the workspace. Needs a GPU for each rank."""
    del world_size
    model = Layers(rank)
    compiled = torch.compile(
        model, backend="fx_fusion", options={"kernel": "fx_fusion", "mode": mode}
    )
    wrong: list[str] = []
    with torch.no_grad():
        for call, tokens in enumerate((8, 8, 8, 3, 3, 8, 5, 3)):  # recaptured for other sizes
            h = hidden_states(tokens, call)
            given = [value.clone() for value in compiled(h)]
            wrong += far_from_eager(model, h, given)
            if differs_between_ranks(given[0]):
                wrong.append(f"call {call}: the ranks' results differ")
    group = dist.group.WORLD
    assert group is not None
    workspace = gpu_workspace(group, torch.device("cuda", torch.cuda.current_device()))
    workspace.check()
    if is_in_a_pool(workspace):
        wrong.append("the workspace lies in a pool of torch's allocator")
    return wrong

"""One rank of `bench decode`: make the model, compile each candidate, capture, compare, time.

Ranks may share a GPU. Then none may load a kernel or take memory from the driver while a
kernel of another rank waits for this one, so everything that does so stands between barriers:
the eager steps load cuBLAS's and attention's kernels, a compilation ends with a barrier before
its code first runs, and memory is taken and given to torch's allocator ahead of the first run.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
import torch.distributed as dist

import fx_fusion
from fx_fusion import compat
from fx_fusion.backend import fx_fusion as fused_backend
from fx_fusion.bench.common import count_cell
from fx_fusion.bench.decode_models import SHAPES, Decoder, Weights
from fx_fusion.demo_rank import digest
from fx_fusion.report import FusionReport

EAGER: Final = "eager"
INDUCTOR: Final = "inductor"
NCCL: Final = "nccl"
FUSED: Final = "fx_fusion"
#: What a candidate's name ends with when its step is replayed from a CUDA graph.
GRAPH: Final = " graph"
WARM_UP: Final = 3
#: Steps queued one after the other for the host's time; few enough that the GPU's queue holds
#: all their kernels and the host never waits for it.
QUEUED: Final = 10
#: The baseline takes its one-shot kernel at every size, as ours does; Inductor's own limit is
#: 128 KiB, above which it calls the process group.
_ONE_SHOT_OPTIONS: Final = {
    "_collective.auto_select": True,
    "_collective.one_shot_all_reduce_threshold_bytes": 2**26,
}
#: A compiled step may differ from eager by the roundings that Inductor leaves out between
#: pointwise operations; each is 2^-9 of a bfloat16 value, and layers add theirs up.
LARGEST_DIFFERENCE: Final = 0.03

_Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What every rank is told: the benchmark's options, and the file to which rank 0 adds each
    cell's results, so that a cell that fails doesn't take the others' with it."""

    device: str
    dtype: str
    layers: int
    cache_length: int
    rounds: int
    kernel: str
    cpp_wrapper: bool
    cells: Sequence[tuple[str, int]]
    results: str
    progress: str = ""


@dataclass
class Measured:
    """What one rank saw of one candidate in one cell.

    Attributes:
        step: Microseconds of each timed step, from its begin to the end of its last kernel.
        host: Microseconds of the host a step, over `QUEUED` steps one after the other.
        compile_seconds: Of the candidate's compilation; 0 for eager.
        peak_mib: The most that torch's allocator gave a step on top of what it held before.
        sites: all_reduces of the graph that were looked at, for fx_fusion.
        fused_sites: Those that were fused.
        difference: Relative distance of the output from eager's.
        same_on_ranks: Whether the output has the same bits on all ranks.
    """

    step: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    compile_seconds: float = 0.0
    peak_mib: float = 0.0
    sites: int = 0
    fused_sites: int = 0
    difference: float = 0.0
    same_on_ranks: bool = True


def measure(rank: int, world_size: int, job: Job) -> None:
    """Measure every cell on this rank; the order of candidates is the same on all ranks."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device(job.device)
    if job.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a kernel for each new shape
        _enable_one_shot(group)
    with torch.no_grad():
        if job.device == "cuda":
            # A rehearsal: loads the compiler, and cuBLAS takes its memory for captures, both of
            # which the first candidate would be charged with.
            _seeded_cell(0, replace(job, layers=1, rounds=0), *job.cells[0], group, device)
        for number, (shape, tokens) in enumerate(job.cells, start=1):
            measured = _seeded_cell(number, job, shape, tokens, group, device)
            ranks: list[Any] = [None] * world_size
            cast(Any, dist).all_gather_object(ranks, measured, group=group)
            if rank == 0:
                with open(job.results, "ab") as file:
                    pickle.dump(ranks, file)
                count_cell(job.progress)


def _seeded_cell(
    number: int,
    job: Job,
    shape: str,
    tokens: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, Measured]:
    """One cell. `number` is another for each cell of a run and the same on all ranks.

    Inductor takes the ids of its symmetric-memory buffers from Python's generator, whose state
    a compilation restores: two sizes would get one id, which torch refuses.
    """
    random.seed(number)
    with contextlib.ExitStack() as caches:
        return _cell(job, shape, tokens, group, device, caches)


def _enable_one_shot(group: dist.ProcessGroup) -> None:
    """Let Inductor lower all_reduce to symmetric memory's one-shot, which is off by itself."""
    import torch.distributed._symmetric_memory as symmetric_memory

    with warnings.catch_warnings():  # deprecated, and still needed before torch 2.15
        warnings.simplefilter("ignore")
        cast(Any, symmetric_memory).enable_symm_mem_for_group(group.group_name)


def _cell(
    job: Job,
    shape_name: str,
    tokens: int,
    group: dist.ProcessGroup,
    device: torch.device,
    caches: contextlib.ExitStack,
) -> dict[str, Measured]:
    """One shape and number of tokens: all candidates, in turn."""
    shape, dtype = SHAPES[shape_name], getattr(torch, job.dtype)
    torch._dynamo.reset()
    weights = Weights(group.rank(), dtype, device)
    model = Decoder(shape, job.layers, tokens, job.cache_length, weights, group).eval()
    hidden = weights.shared(tokens, shape.hidden_size)
    measured = {EAGER: Measured()}
    steps: dict[str, _Step] = {EAGER: model}
    for _ in range(2):
        expected = model(hidden)
    if job.device == "cuda":
        _take_memory(device)
        ready = job.kernel != "unfused" and fx_fusion.prepare(
            group,
            max_tokens=tokens,
            hidden_size=shape.hidden_size,
            dtype=dtype,
            block_limit=_block_limit(group.size()),
        )
        if job.kernel == "fx_fusion" and not ready:
            raise RuntimeError(
                "the group has no memory for fx_fusion's kernel (a warning says why); --kernel"
                " auto runs without it."
            )
    for name in _compiled_names(job, group):
        steps[name], measured[name] = _compiled(name, model, hidden, job, group, caches)
    if job.device == "cuda":
        for name in list(steps):
            if name != EAGER:
                one = measured[name]
                measured[name + GRAPH] = graph = Measured(
                    compile_seconds=one.compile_seconds,
                    sites=one.sites,
                    fused_sites=one.fused_sites,
                )
                steps[name + GRAPH] = _captured(steps[name], hidden, graph, group)
        _take_memory(device)  # a capture begins with giving back what isn't in use
    for name, step in steps.items():
        _check(name, step, hidden, expected, measured[name], group)
    _time(steps, hidden, measured, job.rounds, group)
    return measured


def _compiled_names(job: Job, group: dist.ProcessGroup) -> list[str]:
    """The candidates that are compiled; NCCL's own all_reduce only where it can run."""
    with_nccl = job.device == "cuda" and "nccl" in str(cast(Any, dist).get_backend(group))
    return [INDUCTOR, *([NCCL] if with_nccl else []), FUSED]


def _block_limit(world_size: int) -> int:
    """Blocks of our kernel at most: no limit where each rank has a GPU, else such that half of the
    multiprocessors hold none that waits, for the GEMMs that the waiting depends on."""
    gpus = torch.cuda.device_count()
    multiprocessors = int(torch.cuda.get_device_properties().multi_processor_count)
    return 0 if gpus >= world_size else max(8, multiprocessors * gpus // (2 * world_size))


def _take_memory(device: torch.device) -> None:
    """Have torch's allocator hold memory of both its pools, so that steps find some there."""
    small = [torch.empty(2**19, dtype=torch.uint8, device=device) for _ in range(200)]
    large = torch.empty(2**30, dtype=torch.uint8, device=device)
    del small, large
    torch.cuda.synchronize(device)


def _meet(group: dist.ProcessGroup) -> None:
    """Wait for this rank's kernels, then for the other ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    # By objects over the CPU: a barrier of NCCL is a kernel itself.
    gathered: list[Any] = [None] * group.size()
    cast(Any, dist).all_gather_object(gathered, 0, group=group)


def _compiled(
    name: str,
    model: torch.nn.Module,
    hidden: torch.Tensor,
    job: Job,
    group: dist.ProcessGroup,
    caches: contextlib.ExitStack,
) -> tuple[_Step, Measured]:
    """Compile one candidate, on a GPU from nothing, and run it once."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_cache

    measured = Measured()
    sources: list[str] = []
    options: dict[str, Any] = {"triton.cudagraphs": False}
    if name == INDUCTOR and job.device == "cuda":
        # Not in C++: a comment of Python's stands in that code, so it doesn't compile (2.11 to
        # 2.14; `FreeIfNotReusedLine` of torch/_inductor/codegen/wrapper.py).
        options |= _ONE_SHOT_OPTIONS
    elif job.cpp_wrapper:
        options["cpp_wrapper"] = True

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if name == FUSED:
            chosen = options | {"fx_fusion.kernel": job.kernel}
            code = fused_backend(gm, inputs, options=chosen)
        else:
            code = compat.compile_with_inductor(gm, inputs, options)
        measured.compile_seconds += time.perf_counter() - start
        _meet(group)  # the code's kernels are loaded now, on every rank before any runs one
        return code

    if job.device == "cuda":  # on the CPU it would compile the headers for each candidate
        caches.enter_context(fresh_cache())
    saved = GraphLowering.save_output_code
    cast(Any, GraphLowering).save_output_code = sources.append
    fx_fusion.clear_reports()
    step = cast(_Step, torch.compile(model, backend=backend, dynamic=False, fullgraph=True))
    start = time.perf_counter()
    try:
        step(hidden)
    finally:
        cast(Any, GraphLowering).save_output_code = saved
    _meet(group)
    one_shot = any("one_shot_all_reduce" in source for source in sources)
    if name == INDUCTOR and job.device == "cuda" and not one_shot:
        raise RuntimeError(
            "the code that Inductor generated has no one_shot_all_reduce, so there is no"
            f" baseline to compare with: torch {torch.__version__} did not take its own"
            " lowering over symmetric memory; see torch/_inductor/comm_lowering.py."
        )
    if name == FUSED:
        report = FusionReport.merged(fx_fusion.reports())
        measured.sites, measured.fused_sites = report.site_count, report.fused_count
        if not report.fused_count:
            raise RuntimeError(f"nothing was fused, so there is nothing to time:\n{report}")
    return step, measured


def _captured(
    step: _Step, hidden: torch.Tensor, measured: Measured, group: dist.ProcessGroup
) -> _Step:
    """The step as a CUDA graph over this input; the graph keeps what it reads alive."""
    # Run already, so there is nothing left to load. Not on a side stream, where torch's allocator
    # would have to take memory while another rank's kernel waits.
    _meet(group)
    before = _allocated(reset=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(hidden)
    _meet(group)
    measured.peak_mib = (_allocated() - before) / 2**20

    def replay(_: torch.Tensor) -> torch.Tensor:
        graph.replay()
        return output

    return replay


def _check(
    name: str,
    step: _Step,
    hidden: torch.Tensor,
    expected: torch.Tensor,
    measured: Measured,
    group: dist.ProcessGroup,
) -> None:
    """Compare one step's output with eager's and with the other ranks', and see its memory."""
    _meet(group)
    before = _allocated(reset=True)
    output = step(hidden)
    _meet(group)
    if not name.endswith(GRAPH):  # a replay takes nothing; the capture did
        measured.peak_mib = (_allocated() - before) / 2**20
    apart = (output.double() - expected.double()).norm() / expected.double().norm()
    measured.difference = float(apart)
    gathered: list[Any] = [None] * group.size()
    cast(Any, dist).all_gather_object(gathered, digest([output]), group=group)
    measured.same_on_ranks = len(set(gathered)) == 1
    if not measured.difference <= LARGEST_DIFFERENCE:  # a NaN is not
        raise RuntimeError(
            f"{name}: the output is {measured.difference:.3g} from eager's, relatively; at most"
            f" {LARGEST_DIFFERENCE} is rounding."
        )
    if name.startswith(FUSED) and not measured.same_on_ranks:
        raise RuntimeError(f"{name}: the ranks' outputs differ in their bits.")


def _allocated(*, reset: bool = False) -> int:
    """Bytes: what torch's allocator has given out at most since the last reset; 0 on CPU."""
    if not torch.cuda.is_available():
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.max_memory_allocated())


def _time(
    steps: dict[str, _Step],
    hidden: torch.Tensor,
    measured: dict[str, Measured],
    rounds: int,
    group: dist.ProcessGroup,
) -> None:
    """Time the candidates in turn, so that whatever else goes on falls on all alike."""
    events: list[Any] = []
    if hidden.is_cuda:
        events = [cast(Any, torch.cuda).Event(enable_timing=True) for _ in range(2)]
    for number in range(WARM_UP + rounds):
        for name, step in steps.items():
            _meet(group)
            if events:
                step(hidden)  # brings the ranks into step
                events[0].record()
            start = time.perf_counter()
            step(hidden)
            spent = host = 1e6 * (time.perf_counter() - start)
            if events:
                events[1].record()
                torch.cuda.synchronize()
                spent = 1e3 * float(events[0].elapsed_time(events[1]))
                host = _host_time(step, hidden)
            if number >= WARM_UP:
                measured[name].step.append(spent)
                measured[name].host.append(host)


def _host_time(step: _Step, hidden: torch.Tensor) -> float:
    """Microseconds a step until the call returns, the GPU's work not waited for."""
    start = time.perf_counter()
    for _ in range(QUEUED):
        step(hidden)
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / QUEUED

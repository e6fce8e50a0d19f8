"""Times the candidates of the kernels benchmark: each checked, captured and replayed in turn."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist

from fx_fusion import prepare
from fx_fusion.bench.common import count_cell
from fx_fusion.bench.kernel_candidates import (
    NAMES,
    Candidate,
    Candidates,
    add_rms_norm,
    agreed,
    attempt,
)

#: Ops of a graph.
OPS: Final = 20
#: Rounds that are replayed first and not counted.
WARM_UP: Final = 2
#: The largest difference from the reference, of its value and in itself, after one op. NCCL and
#: torch's kernels may round at each addition.
TOLERANCE: Final = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-16}


@dataclass(frozen=True)
class Cell:
    """One candidate at one size; microseconds per op, not a number where it has a cause.

    `median`, `low` and `high` are over rounds, of the slowest rank. `cause` says why the
    candidate wasn't measured there.
    """

    candidate: str
    world_size: int
    tokens: int
    hidden_size: int
    dtype: str
    median: float
    low: float
    high: float
    cause: str = ""


class Job(NamedTuple):
    """What every rank is told."""

    sizes: Sequence[tuple[int, int]]
    dtype: str
    rounds: int
    names: Sequence[str]
    causes: dict[str, str]
    progress: str = ""


class Inputs(NamedTuple):
    """One rank's inputs of a graph, and what comes out.

    Attributes:
        x: One partial sum for each op, another on every rank.
        residual: The first op's, the same on every rank.
        weight: The norm's.
        first: Norm and residual of the first op.
        last: Norm and residual of the last op, each op taking the residual of the one before.
    """

    x: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor
    first: tuple[torch.Tensor, torch.Tensor]
    last: tuple[torch.Tensor, torch.Tensor]


def make_inputs(
    tokens: int, hidden_size: int, dtype: torch.dtype, rank: int, world_size: int, device: str
) -> Inputs:
    """Random inputs; every rank makes those of all, to add them up in rank order."""

    def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    sources = [torch.Generator(device).manual_seed(1 + r) for r in range(world_size)]
    common = torch.Generator(device).manual_seed(0)
    residual, weight = random(common, tokens, hidden_size), random(common, hidden_size)
    own: list[torch.Tensor] = []
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    hidden = residual
    for number in range(OPS):
        total = torch.zeros(tokens, hidden_size, device=device)
        for r, source in enumerate(sources):
            part = random(source, tokens, hidden_size)
            total += part
            if r == rank:
                own.append(part)
        norm, hidden = add_rms_norm(total.to(dtype), hidden, weight)
        if number in (0, OPS - 1):
            results.append((norm, hidden))
    return Inputs(own, residual, weight, results[0], results[-1])


def difference(
    given: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor],
    tolerance: float,
) -> str:
    """What differs by more than the tolerance, "" if nothing does."""
    for name, one, two in zip(("norm", "residual"), given, expected, strict=True):
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"its {name} is {one.dtype} {tuple(one.shape)}"
        wrong = ~torch.isclose(one.float(), two.float(), rtol=tolerance, atol=tolerance)
        if count := int(wrong.sum()):
            return f"{count} of {wrong.numel()} elements of its {name} are wrong"
    return ""


class Captured(NamedTuple):
    """A graph, and what has to live as long as it.

    Attributes:
        graph: OPS ops, each with the residual of the one before.
        first: Norm and residual of the first op, in the graph's memory.
        last: Those of the last op.
        candidate: Holds the memory that the graph reads and writes besides.
    """

    graph: Any
    first: tuple[torch.Tensor, torch.Tensor]
    last: tuple[torch.Tensor, torch.Tensor]
    candidate: Candidate


def capture(candidate: Candidate, inputs: Inputs) -> Captured:
    """A graph of OPS ops; it doesn't run yet, but all that it needs is loaded."""
    if candidate.warm_up:
        candidate.step(inputs.x[0], inputs.residual, inputs.weight)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.cuda.graph(graph):
        hidden = inputs.residual
        for number, x in enumerate(inputs.x):
            norm, hidden = candidate.step(x, hidden, inputs.weight)
            if number in (0, OPS - 1):
                results.append((norm, hidden))
    return Captured(graph, results[0], results[-1], candidate)


class Meter:
    """Times candidates at one size after another, on one rank."""

    def __init__(self, candidates: Candidates, rounds: int) -> None:
        """Candidates whose shared memory is made."""
        self.candidates = candidates
        self.group = candidates.group
        self.rounds = rounds

    def cell(self, tokens: int, hidden_size: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Microseconds per op of each candidate, one figure a round, and causes of the others."""
        known, dtype = self.candidates, self.candidates.dtype
        causes = {
            name: cause
            for name in known.names
            if (cause := known.cause_at(name, tokens, hidden_size))
        }
        inputs = make_inputs(
            tokens, hidden_size, dtype, self.group.rank(), self.group.size(), "cuda"
        )
        self._load(tokens, hidden_size, inputs)
        graphs: dict[str, Captured] = {}
        for name, candidate in known.at(tokens, hidden_size):
            made, cause = attempt(functools.partial(capture, candidate, inputs))
            if cause := agreed(self.group, cause):
                causes[name] = cause
            else:
                graphs[name] = made
        # Only now does anything wait for a peer: ranks that share a GPU can neither load a
        # kernel nor take memory while the kernel of another waits for them.
        for name, made in list(graphs.items()):
            if cause := self._wrong(made, inputs, TOLERANCE[dtype]):
                causes[name] = cause
                del graphs[name]
        return self._replay(graphs), causes

    def _load(self, tokens: int, hidden_size: int, inputs: Inputs) -> None:
        """Compile and load what isn't loaded by a capture."""
        torch._dynamo.reset()
        prepare(
            self.group,
            max_tokens=tokens,
            hidden_size=hidden_size,
            dtype=self.candidates.dtype,
        )
        torch.compile(add_rms_norm, dynamic=False)(inputs.x[0], inputs.residual, inputs.weight)
        self._together()

    def _together(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(self.group)

    def _wrong(self, made: Captured, inputs: Inputs, tolerance: float) -> str:
        """What a graph got wrong when it ran, on any rank; "" if nothing."""
        if made.candidate.prepare:
            made.candidate.prepare(inputs.x[0])
        self._together()
        made.graph.replay()
        torch.cuda.synchronize()
        wrong = difference(made.first, inputs.first, tolerance)
        if not wrong and made.candidate.prepare is None:
            wrong = difference(made.last, inputs.last, 8 * tolerance)
            wrong = wrong and f"after {OPS} ops, {wrong}"
        return agreed(self.group, wrong)

    def _replay(self, graphs: dict[str, Captured]) -> dict[str, list[float]]:
        events = [cast(Any, torch.cuda).Event(enable_timing=True) for _ in range(2)]
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(self.rounds + WARM_UP):
            for name, made in graphs.items():
                self._together()
                made.graph.replay()  # brings the ranks into step
                events[0].record()
                made.graph.replay()
                events[1].record()
                torch.cuda.synchronize()
                if number >= WARM_UP:
                    times[name].append(events[0].elapsed_time(events[1]) * 1000 / OPS)
        return times


def rank_job(rank: int, world_size: int, job: Job) -> list[Cell]:
    """Time every size on this rank; rank 0 returns the cells, the maximum over ranks."""
    group = dist.group.WORLD
    assert group is not None
    candidates = Candidates(
        group,
        job.sizes,
        getattr(torch, job.dtype),
        job.names,
        torch.cuda.device_count() < world_size,
        dict(job.causes),
    )
    candidates.make()
    meter = Meter(candidates, job.rounds)
    cells: list[Cell] = []
    for tokens, hidden_size in job.sizes:
        times, causes = meter.cell(tokens, hidden_size)
        gathered: list[Any] = [None] * world_size
        cast(Any, dist).all_gather_object(gathered, times, group=group)
        at = (world_size, tokens, hidden_size, job.dtype)
        for name in NAMES:
            if name in times:
                cells.append(Cell(name, *at, *slowest([own[name] for own in gathered])))
            elif name in causes:
                cells.append(Cell(name, *at, math.nan, math.nan, math.nan, causes[name]))
        if rank == 0:
            count_cell(job.progress)
    return cells if rank == 0 else []


def slowest(times: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Median and quartiles over rounds of the slowest rank's time; one sequence for each rank."""
    low, median, high = statistics.quantiles(
        [max(column) for column in zip(*times, strict=True)], n=4
    )
    return round(median, 2), round(low, 2), round(high, 2)

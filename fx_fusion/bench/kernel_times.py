"""Times the candidates of the kernels benchmark: each captured, checked and replayed in turn."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist

from fx_fusion import prepare
from fx_fusion.bench.common import count_cell
from fx_fusion.bench.kernel_candidates import OWN_KERNELS, Candidates, agreed, attempt
from fx_fusion.bench.kernel_graphs import (
    ALONE,
    COLD,
    WARM,
    Captured,
    Gemms,
    Inputs,
    capture,
    capture_gemms,
    make_gemms,
    make_inputs,
    replay_microseconds,
    wrong_results,
)
from fx_fusion.bench.kernel_steps import Candidate, add_rms_norm

#: Rounds that are replayed first and not counted.
WARM_UP: Final = 2


class Measured(NamedTuple):
    """What was measured at one size.

    Attributes:
        tokens: Rows.
        hidden_size: Elements of a row.
        between: What stands between the ops of the graph.
        times: Microseconds an op in each round, of the slowest rank, by candidate.
        causes: Why others weren't measured, or what was wrong with the results of some.
    """

    tokens: int
    hidden_size: int
    between: str
    times: dict[str, list[float]]
    causes: dict[str, str]


class Job(NamedTuple):
    """What every rank is told.

    Attributes:
        sizes: Tokens and hidden sizes.
        dtype: Of x, residual and weight, by name.
        rounds: Replays of a graph that are counted.
        names: The candidates that are wanted.
        causes: Those of them that can't run, and why.
        in_model: Time the ops between GEMMs too.
        progress: A file to which each size that is done adds a byte, "" for none.
        partial: A file in which rank 0 keeps what it has so far, "" for none.
        keep: What rank 0 calls with what it has so far, after each size; can be pickled.
    """

    sizes: Sequence[tuple[int, int]]
    dtype: str
    rounds: int
    names: Sequence[str]
    causes: dict[str, str]
    in_model: bool = False
    progress: str = ""
    partial: str = ""
    keep: Callable[[list[Measured]], None] | None = None


class Meter:
    """Times candidates at one size after another, on one rank."""

    def __init__(self, candidates: Candidates, rounds: int) -> None:
        """Candidates whose shared memory is made."""
        self.known = candidates
        self.group = candidates.group
        self.rounds = rounds

    def compile_norms(self) -> None:
        """Compile the norm of every size, each rank a part, into the cache that they share."""
        for number, (tokens, hidden_size) in enumerate(self.known.sizes):
            if number % self.group.size() == self.group.rank():
                sample = torch.zeros(tokens, hidden_size, dtype=self.known.dtype, device="cuda")
                self._compile_norm(sample, sample, sample[0])
        self._together()

    def _compile_norm(
        self, reduced: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> None:
        torch._dynamo.reset()  # so that the number of sizes meets no limit
        torch.compile(add_rms_norm, dynamic=False)(reduced, residual, weight)

    def cell(
        self, tokens: int, hidden_size: int, in_model: bool
    ) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
        """What was measured at one size.

        Returns:
            By what stands between the ops and by candidate, microseconds per op, one figure a
            round; and the causes of the candidates that weren't measured or were wrong.
        """
        known, dtype = self.known, self.known.dtype
        causes = {
            name: cause
            for name in known.names
            if (cause := known.cause_at(name, tokens, hidden_size))
        }
        inputs = make_inputs(
            tokens, hidden_size, dtype, self.group.rank(), self.group.size(), "cuda"
        )
        self._compile_norm(inputs.x[0], inputs.residual, inputs.weight)
        # Memory alone: the kernels that are needed are compiled and loaded by the captures, while
        # with sizes prepare() would compile all that a model might need.
        usable = prepare(self.group)
        candidates = dict(known.at(tokens, hidden_size))
        if not usable:  # the same on every rank
            for name in set(OWN_KERNELS) & set(candidates):
                causes[name] = "our kernels can't run here, as a warning of fx_fusion says"
                del candidates[name]
        graphs = self._captured(candidates, inputs, None, causes)
        # Only now does anything wait for a peer: ranks that share a GPU can neither load a
        # kernel nor take memory while the kernel of another waits for them.
        for name, candidate in candidates.items():
            if name not in graphs:
                continue
            if cause := self._wrong(graphs[name], candidate, inputs):
                causes[name] = cause
                if not candidate.foreign:
                    del graphs[name]
        ops = len(inputs.x)
        times = {ALONE: self._replay(graphs, ops)}
        right = {name: candidates[name] for name in graphs}
        for between in (WARM, COLD) if in_model else ():
            gemms = make_gemms(
                tokens, hidden_size, dtype, self.group.size(), cold=between == COLD
            )
            self._together()
            alone = capture_gemms(gemms, ops)
            around = self._captured(right, inputs, gemms, {})
            times[between] = self._replay(around, ops, alone)
        return times, causes

    def _captured(
        self,
        candidates: dict[str, Candidate],
        inputs: Inputs,
        gemms: Gemms | None,
        causes: dict[str, str],
    ) -> dict[str, Captured]:
        """The graphs of the candidates that every rank could capture; the causes of the others."""
        graphs: dict[str, Captured] = {}
        for name, candidate in candidates.items():
            made, cause = attempt(functools.partial(capture, candidate, inputs, gemms))
            if cause := agreed(self.group, cause):
                causes[name] = cause
            else:
                graphs[name] = made
        return graphs

    def _together(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(self.group)

    def _wrong(self, made: Captured, candidate: Candidate, inputs: Inputs) -> str:
        """What a graph got wrong when it ran, on any rank; "" if nothing."""
        if candidate.prepare is not None:
            candidate.prepare(inputs.x[0])
        self._together()
        made.graph.replay()
        torch.cuda.synchronize()
        return agreed(self.group, wrong_results(made, candidate, inputs))

    def _replay(
        self, graphs: dict[str, Captured], ops: int, without: Any = None
    ) -> dict[str, list[float]]:
        """Times of the graphs in turn, less that of the graph `without` the ops."""
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(self.rounds + WARM_UP):
            base = 0.0
            if without is not None:
                self._together()
                base = replay_microseconds(without, ops)
            for name, made in graphs.items():
                self._together()
                taken = replay_microseconds(made.graph, ops) - base
                if number >= WARM_UP:
                    times[name].append(taken)
        return times


def rank_job(rank: int, world_size: int, job: Job) -> list[Measured]:
    """Time every size on this rank; rank 0 returns what was measured."""
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
    meter.compile_norms()
    found: list[Measured] = []
    for tokens, hidden_size in job.sizes:
        times, causes = meter.cell(tokens, hidden_size, job.in_model)
        gathered: list[Any] = [None] * world_size
        cast(Any, dist).all_gather_object(gathered, times, group=group)
        for between, own in times.items():
            slowest = {
                name: [
                    max(column)
                    for column in zip(
                        *(other[between][name] for other in gathered), strict=True
                    )
                ]
                for name in own
            }
            found.append(Measured(tokens, hidden_size, between, slowest, causes))
        if rank == 0:
            save(job.partial, found)
            if job.keep is not None:
                job.keep(found)
            count_cell(job.progress)
    return found if rank == 0 else []


def save(path: str, found: list[Measured]) -> None:
    """Write what is measured so far, whole or not at all, for the case that the rest fails."""
    if path:
        part = Path(f"{path}.part")
        part.write_bytes(pickle.dumps(found))
        part.replace(path)


def saved(path: str) -> list[Measured]:
    """What `save` wrote, [] if nothing."""
    try:
        return cast(list[Measured], pickle.loads(Path(path).read_bytes()))
    except FileNotFoundError:
        return []

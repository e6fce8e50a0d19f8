"""Batches of random programs on two real processes: the ranks' side and the verdict.

Each rank checks every program by itself, the collectives being what the two share; whoever
asked for the batch compares what they say.
"""

from __future__ import annotations

import collections
import contextlib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from graph_caches import compile_every_graph_again
from random_graphs import generate
from random_ops import names
from random_programs import Program
from random_runs import Groups, Outcome, check, difference, poisoned, ready, trace

import fx_fusion
from fx_fusion.passes.pipeline import fuse_graph
from fx_fusion.report import FusionReport, SiteReport
from fx_fusion.settings import FusionSettings
from fx_fusion.switch import disable
from fx_fusion.testing import fake_group, spawn

#: What a rank says of one seed: what is wrong, the sites, their norm forms.
Said = tuple[list[str], list[dict[str, Any]], list[str]]


@dataclass
class Batch:
    """What became of a batch of programs.

    Attributes:
        failures: For each program that something is wrong with, all there is to know.
        sites: The report of each site, by seed.
        forms: The norm forms of the fused sites.
        tags: For each piece of a program, in how many fused sites and in how many sites.
    """

    failures: list[str] = field(default_factory=list)
    sites: dict[int, list[SiteReport]] = field(default_factory=dict)
    forms: collections.Counter[str] = field(default_factory=collections.Counter)
    tags: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def outcomes(self) -> collections.Counter[str]:
        """How many sites ended each way: "fused", or a Reason's value."""
        return collections.Counter(
            "fused" if site.reason is None else site.reason.value
            for sites in self.sites.values()
            for site in sites
        )

    @property
    def fused_share(self) -> float:
        """The share of programs that hold a fused site."""
        held = [any(site.fused for site in sites) for sites in self.sites.values()]
        return sum(held) / max(1, len(held))

    def summary(self) -> str:
        """The distribution as text."""
        lines = [
            f"{len(self.sites)} programs, {self.fused_share:.0%} with a fused site,"
            f" {len(self.failures)} failed"
        ]
        for counts in (self.outcomes, self.forms):
            lines.append(", ".join(f"{name}: {n}" for name, n in counts.most_common()))
        lines.append(
            ", ".join(f"{name}: {a}/{b}" for name, (a, b) in sorted(self.tags.items()))
        )
        return "\n".join(lines)


def run_on_two_ranks(
    seeds: Sequence[int], *, compiled: bool = False, timeout: float = 300.0
) -> Batch:
    """Run the programs of these seeds on two processes and collect what they say."""
    job = compiled_job if compiled else graph_job
    ranks = spawn(job, 2, timeout=timeout, args=(list(seeds),))
    batch = Batch()
    tags: dict[str, list[int]] = {}
    for seed in seeds:
        program = generate(seed, plain=compiled)
        wrong = _verdict([rank.get(seed) for rank in ranks])
        if wrong:
            batch.failures.append(failure_text(seed, program, wrong, compiled=compiled))
        said: Said = ranks[0].get(seed, ([], [], []))
        batch.sites[seed] = [SiteReport.from_dict(site) for site in said[1]]
        batch.forms.update(said[2])
        for site, report in zip(program.sites, batch.sites[seed], strict=False):
            for tag in site.tags:
                count = tags.setdefault(tag, [0, 0])
                count[0] += report.fused
                count[1] += 1
    batch.tags = {tag: (fused, all_of_them) for tag, (fused, all_of_them) in tags.items()}
    return batch


def failure_text(
    seed: int, program: Program, wrong: Sequence[str], *, compiled: bool = False
) -> str:
    """A failed program with all that is needed to run it again."""
    option = " --compile" if compiled else ""
    faults = "\n".join(wrong)
    return (
        f"seed {seed}; again: python tests/passes/random_graphs.py --seed {seed}{option}\n"
        f"{program}{faults}"
    )


def _verdict(said: Sequence[Said | None]) -> list[str]:
    """What is wrong by the word of any rank, or because they differ."""
    wrong = []
    for rank, word in enumerate(said):
        if word is None:
            wrong.append(f"rank {rank} didn't come to it, as an earlier program timed out")
        else:
            wrong += [f"rank {rank}: {line}" for line in word[0]]
    if not wrong and len({repr(word) for word in said}) > 1:
        wrong.append(f"the ranks' reports differ: {said}")
    return wrong


def _said(outcome: Outcome, groups: Groups) -> Said:
    sites = [site.to_dict() for site in outcome.report.sites]
    for site in sites:
        if site["group"] == groups.one:  # each rank's own
            site["group"] = "one"
    return outcome.wrong, sites, outcome.forms


def _went_on(said: Said) -> bool:
    """False if a collective timed out: what follows would only time out too."""
    return not any("imed out" in line or "onnection closed" in line for line in said[0])


def graph_job(rank: int, world_size: int, seeds: list[int]) -> dict[int, Said]:
    """Run by each rank: check the graph of every program."""
    said: dict[int, Said] = {}
    with ready(rank) as groups:
        for seed in seeds:
            said[seed] = _said(check(generate(seed), seed, rank, groups), groups)
            if not _went_on(said[seed]):
                break
    return said


def compiled_job(rank: int, world_size: int, seeds: list[int]) -> dict[int, Said]:
    """Run by each rank: compile every program and compare it with eager."""
    compile_every_graph_again()
    said: dict[int, Said] = {}
    with ready(rank) as groups, _eager_roundings():
        for seed in seeds:
            outcome = _compiled_outcome(generate(seed, plain=True), seed, rank, groups)
            said[seed] = _said(outcome, groups)
            if not _went_on(said[seed]):
                break
    return said


@contextlib.contextmanager
def _eager_roundings() -> Iterator[None]:
    """Have Inductor round where eager does, also inside a kernel of several ops."""
    from torch._inductor import config

    with config.patch(emulate_precision_casts=True, compile_threads=1):
        yield


def _compiled_outcome(program: Program, seed: int, rank: int, groups: Groups) -> Outcome:
    """Compile one program through Inductor with our pass; compare it with eager."""
    outcome = Outcome()
    function = program.function(names(groups.world, groups.pair, groups.one))
    dynamic = program.mode != "static"
    calls = (0, 3) if dynamic else (0,)
    try:
        torch.compiler.reset()
        fx_fusion.clear_reports()
        options = fx_fusion.inductor_options(kernel="unfused")
        compiled = torch.compile(function, options=options, fullgraph=True)
        for more_tokens in calls:
            inputs = program.tensors(seed, rank, more_tokens)
            _mark_dynamic(program, inputs)
            with torch.no_grad():
                started = groups.count()
                expected = function(*inputs)
                eager = groups.count() - started
                with poisoned():
                    given = compiled(*inputs)
            outcome.wrong += _compiled_faults(program, given, expected)
            ran = groups.count() - started - eager
            if ran != eager:
                outcome.wrong.append(f"{ran} collectives ran, {eager} in eager")
        report = FusionReport.merged(fx_fusion.reports())
        outcome.report = report.graphs[0]
        if report.fused_count != len(program.sites) or len(report.graphs) != 1:
            outcome.wrong.append(f"not all fused in one graph: {report.to_dict()}")
    except Exception:
        outcome.wrong.append(f"compiling or running fails:\n{traceback.format_exc()}")
    return outcome


def _mark_dynamic(program: Program, inputs: Sequence[torch.Tensor]) -> None:
    for given, tensor in zip(program.inputs, inputs, strict=True):
        for place, dim in enumerate(given.dims):
            if isinstance(dim, str):
                torch._dynamo.maybe_mark_dynamic(tensor, place)


def _compiled_faults(
    program: Program, given: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> Iterator[str]:
    for name, mine, eager in zip(program.outputs, given, expected, strict=True):
        found = difference(mine, eager)
        if found:
            yield f"{name}: {found}"


def describe(seed: int) -> str:
    """The graph of a program before and after the pass, as text."""
    program = generate(seed)
    with fake_group(2), ready(0) as groups:
        module = trace(program, groups, program.tensors(seed, 0))
        before = str(module.graph)
        with disable(program.disabled):
            fuse_graph(module.graph, FusionSettings.from_dict(program.settings))
    return f"{before}\n{module.graph}\n"

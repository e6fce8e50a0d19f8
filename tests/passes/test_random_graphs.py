"""Random programs, rewritten and run on two real ranks, equal what they were before the pass.

`random_graphs` makes the programs, `random_runs` checks one, `random_batches` runs many. A
failure prints the program and the command that runs it again.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, Final, get_args

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from random_batches import Batch, failure_text, run_on_two_ranks
from random_graphs import ProgramWriter, generate
from random_programs import Program, written
from random_runs import Groups, check, ready
from torch import fx
from written_graphs import ORDER, SHAPES, SYMBOLIC, ladder, stream
from written_sites import CROSSED, OPAQUE
from written_values import SCALARS, SPELLINGS

from fx_fusion.lowering.norm_form import Reciprocal
from fx_fusion.passes import pipeline
from fx_fusion.report import GraphReport, Reason
from fx_fusion.settings import FusionSettings
from fx_fusion.testing import fake_group

GRAPHS: Final = range(320)
COMPILED: Final = range(20)
WRITTEN: Final = {**SCALARS, **SPELLINGS, **CROSSED, **OPAQUE, **ORDER, **SHAPES, **SYMBOLIC}

#: The Reasons that no graph of these can end with; test_reasons.py provokes each.
ELSEWHERE: Final = {
    Reason.DEVICE: "two ranks on one kind of device, all tensors on it",
    Reason.GROUP_IS_NODE: "tracing bakes the group's name",
    Reason.NOT_FASTER: "a plan for a GPU; on the CPU our kernel takes every size",
    Reason.INTERNAL_ERROR: "given by the pass around fuse_graph, which mustn't fail here",
}


def assert_none_failed(batch: Batch) -> None:
    shown = "\n\n".join(batch.failures[:5])
    assert not batch.failures, f"{len(batch.failures)} programs failed:\n\n{shown}"


def norm_forms() -> set[str]:
    """Every norm form; a cast before no weight is the cast of the result."""
    weights = [("w", "before"), ("w", "after"), ("1+w", "before"), ("1+w", "after")]
    return {
        f"{weight} {cast} {reciprocal}"
        for weight, cast in [*weights, ("none", "after")]
        for reciprocal in get_args(Reciprocal)
    }


def test_random_graphs_run_as_before_on_two_ranks_and_cover_all_forms_and_reasons() -> None:
    batch = run_on_two_ranks(GRAPHS, timeout=420)
    assert_none_failed(batch)
    assert batch.fused_share >= 0.6
    assert norm_forms() - set(batch.forms) == set()
    reasons = {reason.value for reason in Reason if reason not in ELSEWHERE}
    assert set(batch.outcomes) == reasons | {"fused"}
    never_fused = {
        tag
        for site in (site for seed in GRAPHS for site in generate(seed).sites)
        if site.allowed == {"fused"}
        for tag in site.tags
        if batch.tags[tag][0] == 0
    }
    assert never_fused == set()


def test_random_programs_compiled_by_inductor_equal_eager_on_two_ranks() -> None:
    batch = run_on_two_ranks(COMPILED, compiled=True, timeout=420)
    assert_none_failed(batch)
    assert set(batch.outcomes) == {"fused"}


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with fake_group(2), ready(0) as made:
        yield made


def assert_right(program: Program, groups: Groups) -> None:
    outcome = check(program, 1, 0, groups)
    faults = "\n".join(outcome.wrong)
    assert not outcome.wrong, f"\n{program}{faults}"


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(draws=st.randoms(use_true_random=False))
def test_what_hypothesis_draws_runs_as_before(groups: Groups, draws: random.Random) -> None:
    program = ProgramWriter(draws).program()
    note(str(program))
    assert_right(program, groups)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("decomposed", [True, False], ids=["decomposed", "as called"])
def test_a_trap_is_met_with_the_right_outcome_and_numbers(
    groups: Groups, name: str, decomposed: bool
) -> None:
    assert_right(dataclasses.replace(WRITTEN[name], decomposed=decomposed), groups)


@pytest.mark.parametrize("program", [stream(80), ladder(80)], ids=["stream", "ladder"])
def test_eighty_sites_in_one_graph(groups: Groups, program: Program) -> None:
    assert_right(program, groups)


def test_a_seed_gives_one_program() -> None:
    assert [str(generate(seed)) for seed in GRAPHS] == [str(generate(s)) for s in GRAPHS]


def test_a_failure_names_the_command_that_runs_it_again() -> None:
    text = failure_text(17, generate(17), ["rank 0: v1: differs"])
    assert "python tests/passes/random_graphs.py --seed 17\n" in text
    assert generate(17).source() in text
    assert text.endswith("rank 0: v1: differs")


# The checker itself: each fault of a pass must be seen.

PLAIN: Final = written(
    """y = sum_ranks(x)
    h = y + r
    return rms(h, w), h""",
    "fused",
    x="bf16[4, 64]",
    r="shared bf16[4, 64]",
    w="shared bf16[64]",
)


def faults(monkeypatch: pytest.MonkeyPatch, groups: Groups, broken: Any) -> str:
    """What `check` says of a pass after which `broken` meddles with the graph or the report."""
    fuse = pipeline.fuse_graph

    def meddled(graph: fx.Graph, options: FusionSettings) -> GraphReport:
        report = fuse(graph, options)
        return broken(graph, report) or report

    monkeypatch.setattr(pipeline, "fuse_graph", meddled)
    return "\n".join(check(PLAIN, 1, 0, groups).wrong)


def fused_node(graph: fx.Graph) -> fx.Node:
    op = torch.ops.fx_fusion.all_reduce_add_rms_norm.default
    (node,) = [node for node in graph.nodes if node.target is op]
    assert isinstance(node, fx.Node)
    return node


def test_the_checker_sees_other_numbers(
    monkeypatch: pytest.MonkeyPatch, groups: Groups
) -> None:
    def other_eps(graph: fx.Graph, report: GraphReport) -> None:
        node = fused_node(graph)
        node.args = (*node.args[:4], 0.01, *node.args[5:])

    assert "elements differ" in faults(monkeypatch, groups, other_eps)


def test_the_checker_sees_an_all_reduce_left_behind(
    monkeypatch: pytest.MonkeyPatch, groups: Groups
) -> None:
    def left(graph: fx.Graph, report: GraphReport) -> None:
        node = fused_node(graph)
        with graph.inserting_before(node):
            graph.call_function(
                torch.ops._c10d_functional.all_reduce.default,
                (node.args[0], "sum", groups.world),
            )

    assert "1 all_reduces left, 0 expected" in faults(monkeypatch, groups, left)


def test_the_checker_sees_a_site_that_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, groups: Groups
) -> None:
    def silent(graph: fx.Graph, report: GraphReport) -> GraphReport:
        return GraphReport()

    assert "1 all_reduces, 0 of them reported" in faults(monkeypatch, groups, silent)


def test_the_checker_sees_a_wrong_fake_tensor(
    monkeypatch: pytest.MonkeyPatch, groups: Groups
) -> None:
    def other_shape(graph: fx.Graph, report: GraphReport) -> None:
        (first, *_) = fused_node(graph).users
        first.meta["val"] = first.meta["val"].unsqueeze(0)

    assert "fake torch.bfloat16[1, 4, 64], real" in faults(monkeypatch, groups, other_shape)


def test_the_checker_sees_an_unexpected_outcome(
    monkeypatch: pytest.MonkeyPatch, groups: Groups
) -> None:
    def refused(graph: fx.Graph, report: GraphReport) -> GraphReport:
        (site,) = report.sites
        site = dataclasses.replace(site, fused=False, reason=Reason.NO_NORM)
        return dataclasses.replace(report, sites=(site,))

    assert "site 0: no_norm {} for fused" in faults(monkeypatch, groups, refused)

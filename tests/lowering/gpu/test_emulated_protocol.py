"""The GPU kernels' protocol on emulated ranks: ranks that fail, and mutants of the sources.

The mutants show the teeth of the comparisons: each breaks a rule, and has to be found out.
"""

from __future__ import annotations

import random
from unittest import mock

import pytest
from emulated_calls import Built, arguments_of, build_all, calls_with_marks
from emulated_ranks import Mutation, Ranks

from fx_fusion.errors import PeerTimeoutError
from fx_fusion.lowering import gpu_build, gpu_layout
from fx_fusion.lowering.cpu_build import compiler

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Built:
    built = Built(3, {"one-shot": 2, "two-shot": 2})
    return built.build(tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("algorithm", ["one-shot", "two-shot"])
def test_an_absent_rank_ends_the_wait_with_nan_and_an_error(
    three: Built, algorithm: str
) -> None:
    """Two-shot too names the absent rank alone: an owner passes on for whom it waited."""
    choice = random.Random(5)
    calls = [arguments_of(1, 3, 3, choice) for _ in range(2)]
    with three.ranks() as ranks:
        for workspace in ranks.workspaces:
            workspace.timeout_nanoseconds = 300_000  # the emulator's clock counts steps
        given = [[ranks.call(rank, own[rank], algorithm) for own in calls] for rank in (0, 2)]
        assert ranks.run() == 0
        for results in (result for own in given for result in own):
            assert all(bool(value.isnan().all()) for value in results)
        for rank in (0, 2):
            with pytest.raises(PeerTimeoutError, match="rank 1 did not come"):
                ranks.workspaces[rank].check()
        ranks.workspaces[1].check()


@pytest.mark.parametrize("algorithm", ["one-shot", "two-shot"])
def test_two_calls_at_work_on_one_segment_are_an_error(three: Built, algorithm: str) -> None:
    choice = random.Random(6)
    with three.ranks() as ranks:
        states = gpu_layout.layout(3).region(algorithm).state
        ranks.memories[0][states + 4] = 1  # as another launch would leave it while it runs
        for rank, arguments in enumerate(arguments_of(1, 2, 3, choice)):
            ranks.call(rank, arguments, algorithm)
        assert ranks.run() == 0
        with pytest.raises(PeerTimeoutError, match="two calls overlapped"):
            ranks.workspaces[0].check()


ONE_WORD = ("k < 4; ++k) found |=", "k < 1; ++k) found |=")
#: Each breaks a rule of the protocol, by algorithm: what to replace, by what.
MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "one-shot": {
        "no wipe": [("if (!broken && v.inside)", "if (false)")],
        "one slot": [("slot[k] ^ 1u", "0u")],
        "one word polled": [ONE_WORD],
        "inputs read before the wait": [("  wait_for_predecessor();\n", "")],
        "stride of the call's rows": [
            ("* p.segments + segment", "* static_cast<u32>(p.rows * p.row_segments) + segment"),
            (
                "static_cast<u64>(p.segments) * kSegment",
                "static_cast<u64>(p.rows * p.row_segments) * kSegment",
            ),
        ],
    },
    "two-shot": {
        "no wipe": [("if (!broken && v.inside)", "if (false)")],
        "parts not wiped": [
            (
                "push(scatter_place(p, p.rank, source",
                "if (false) push(scatter_place(p, p.rank, source",
            )
        ],
        "sums not wiped": [
            ("push(gather_place(p, p.rank, owner, segment) + column, nothing);", ";")
        ],
        "one slot": [("slot[k] ^ 1u", "0u")],
        "one word polled": [ONE_WORD],
        "inputs read before the wait": [("  wait_for_predecessor();\n", "")],
        "stride of the call's rows": [
            (
                "* p.segments + segment;",
                "* ((p.rows + kWorld - 1) / kWorld * p.row_segments) + segment;",
            ),
            (
                "static_cast<u64>(p.segments) * kSegment",
                "static_cast<u64>((p.rows + kWorld - 1) / kWorld * p.row_segments) * kSegment",
            ),
        ],
        "a row's part sent when it is its turn": [
            ("scatter(p, spread, row);\n  }", ";\n  }"),
            (
                "      Inputs inputs;\n",
                "      Inputs inputs;\n      if (!own) scatter(p, spread, row);\n",
            ),
        ],
    },
}


#: Two more of each algorithm: the control, and a mutant that only special values tell.
AS_IT_IS, MARKS_SENT = "as it is", "marks sent"
#: The sources as they are end all their runs within two thirds of that; mutants may never end.
STEPS = 2_000_000
RUNS, CALLS = 4, 24


def mutation(algorithm: str, changes: list[tuple[str, str]]) -> Mutation:
    files = (gpu_build.KERNELS[algorithm].source, "gpu_exchange.h")
    texts = [gpu_build.sources()[file] for file in files]
    for old, _ in changes:
        assert any(old in text for text in texts), old

    def mutate(file: str, source: str) -> str:
        for change in changes if file in files else ():
            source = source.replace(*change)
        return source

    return mutate


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Built]:
    """All of them in one library, by algorithm and name."""
    sent = [("if (v.w[k] >= kFailed)", "if (false)")]
    given = {
        (algorithm, name): (algorithm, mutation(algorithm, changes))
        for algorithm, own in MUTANTS.items()
        for name, changes in {**own, AS_IT_IS: [], MARKS_SENT: sent}.items()
    }
    return build_all(tmp_path_factory.mktemp("mutants"), 3, given)


@pytest.mark.parametrize("algorithm", MUTANTS)
def test_the_sources_as_they_are_pass_the_mutants_runs(
    algorithm: str, mutants: dict[tuple[str, str], Built]
) -> None:
    built = mutants[algorithm, AS_IT_IS]
    with mock.patch.object(Ranks, "most_steps", STEPS // 3 * 2):
        assert [built.failures(seed, CALLS) for seed in range(RUNS)] == [[]] * RUNS


@pytest.mark.parametrize(
    ("algorithm", "name"), [(a, name) for a, own in MUTANTS.items() for name in own]
)
def test_the_tests_see_what_breaks_the_protocol(
    algorithm: str, name: str, mutants: dict[tuple[str, str], Built]
) -> None:
    with mock.patch.object(Ranks, "most_steps", STEPS):
        assert any(mutants[algorithm, name].failures(seed, CALLS) for seed in range(RUNS))


@pytest.mark.parametrize("algorithm", MUTANTS)
def test_a_mark_that_is_sent_would_be_waited_for_for_ever(
    algorithm: str, mutants: dict[tuple[str, str], Built]
) -> None:
    built = mutants[algorithm, MARKS_SENT]
    with mock.patch.object(Ranks, "most_steps", STEPS), built.ranks() as ranks:
        for rank, call in enumerate(calls_with_marks(0, 3)):
            ranks.call(rank, call, algorithm)
        assert ranks.run() != 0

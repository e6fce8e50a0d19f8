"""Every case on real ranks, compiled, beside eager: values, dtypes, shapes, strides, gradients."""

from __future__ import annotations

import pytest
from case_runs import Outcome, run_cases
from case_support import CASES

from fx_fusion.testing import spawn

WORLDS = (2, 4)
#: These run once more with dynamic=True.
DYNAMIC = ("reshape_in_between", "scaled_residual", "in_place", "mixed_dtypes")


def names(world_size: int) -> tuple[str, ...]:
    return tuple(case.name for case in CASES.values() if case.world_size == world_size)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """What became of each case, by name, on each rank."""
    found: dict[str, list[Outcome]] = {}
    for world_size in WORLDS:
        arguments = (names(world_size), DYNAMIC if world_size == 2 else ())
        ranks = spawn(run_cases, world_size, timeout=540, args=arguments)
        found.update({name: [rank[name] for rank in ranks] for name in ranks[0]})
    return found


@pytest.mark.parametrize("name", CASES)
def test_equals_eager_on_every_rank(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    case = CASES[name]
    assert [outcome.faults for outcome in outcomes[name]] == [()] * case.world_size
    assert {outcome.fused for outcome in outcomes[name]} == {case.fused}
    assert {outcome.reasons for outcome in outcomes[name]} == {case.reasons}


@pytest.mark.parametrize("name", DYNAMIC)
def test_equals_eager_with_dynamic_shapes(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    expected = (CASES[name].fused, CASES[name].reasons, ())
    for outcome in outcomes[f"{name}, dynamic"]:
        assert (outcome.fused, outcome.reasons, outcome.faults) == expected

"""The Triton kernel in Triton's interpreter, on a machine without a GPU: its numbers, its protocol."""

from __future__ import annotations

import pytest
import triton_ranks
from triton_registers import triton_is_missing

from fx_fusion.testing import spawn

pytestmark = pytest.mark.skipif(triton_is_missing() != "", reason=triton_is_missing())

#: World size to how many calls: one takes half a second.
CALLS = {2: 7, 3: 5}


def run(size: int, factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    folder = factory.mktemp("ranks")
    return spawn(triton_ranks.protocol, size, timeout=120, args=(str(folder), CALLS[size]))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return run(2, tmp_path_factory)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return run(3, tmp_path_factory)


def test_what_follows_the_sum_gives_the_bits_of_the_contract() -> None:
    assert spawn(triton_ranks.local_forms, 1) == [[]]


def test_calls_of_two_ranks_give_the_bits_of_the_contract(
    two: list[dict[str, list[str]]],
) -> None:
    assert [failed["mixed calls"] for failed in two] == [[]] * 2


@pytest.mark.parametrize("name", triton_ranks.MUTANTS)
def test_the_tests_see_what_breaks_the_protocol(
    two: list[dict[str, list[str]]], name: str
) -> None:
    assert any(failed[name] for failed in two)


@pytest.mark.parametrize("job", ["mixed calls", "absent rank", "overlap"])
def test_three_ranks_exchange_rows_and_notice_failures(
    three: list[dict[str, list[str]]], job: str
) -> None:
    assert [failed[job] for failed in three] == [[]] * 3

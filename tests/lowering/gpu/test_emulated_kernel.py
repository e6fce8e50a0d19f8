"""The GPU kernels' sources on emulated ranks: their bits, under random schedules."""

from __future__ import annotations

import random

import pytest
import torch
from emulated_calls import FORMS, Built, arguments_of, calls_with_marks, wrong
from emulated_ranks import MULTIPROCESSORS

from fx_fusion.lowering import gpu_layout
from fx_fusion.lowering.arguments import Results
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.lowering.reference import eager_lines, rank_order_reference

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C++ compiler")

#: World size to the number of forms of each algorithm and of calls: an emulated thread costs
#: about a microsecond.
SIZES: dict[int, tuple[dict[str, int], int]] = {
    2: ({"one-shot": 7}, 12),
    3: ({"one-shot": 7, "two-shot": 7}, 20),
    4: ({"one-shot": 4, "two-shot": 5}, 14),
    8: ({"one-shot": 3, "two-shot": 3}, 8),
    16: ({"one-shot": 2, "two-shot": 1}, 4),
}


@pytest.fixture(scope="module", params=sorted(SIZES))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    built = Built(request.param, SIZES[request.param][0])
    return built.build(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Built:
    built = Built(3, {"one-shot": 3, "two-shot": 3, "local": 3})
    return built.build(tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("seed", range(2))
def test_mixed_calls_give_the_bits_of_the_contract(built: Built, seed: int) -> None:
    assert built.failures(seed, SIZES[built.size][1]) == []


@pytest.mark.parametrize("algorithm", ["one-shot", "two-shot"])
def test_a_row_has_the_same_bits_in_any_batch_and_any_spread_over_blocks(
    three: Built, algorithm: str
) -> None:
    choice = random.Random(4)
    form = 2
    shapes = [
        gpu_layout.geometry(FORMS[form][1], 2, 3, rows, MULTIPROCESSORS, True)
        for rows in (8, 1)
    ]
    assert shapes[0].cluster != shapes[1].cluster
    whole = arguments_of(form, 8, 3, choice)
    with three.ranks() as ranks:
        together = [ranks.call(rank, call, algorithm) for rank, call in enumerate(whole)]
        assert ranks.run() == 0
        for row in (0, 5, 7):
            alone = []
            for rank, arguments in enumerate(whole):
                assert arguments.residual is not None
                one = slice(row, row + 1)
                part = arguments._replace(x=arguments.x[one], residual=arguments.residual[one])
                alone.append(ranks.call(rank, part, algorithm))
            assert ranks.run() == 0
            for one_row, all_rows in zip(alone, together, strict=True):
                assert torch.equal(one_row.norm[0], all_rows.norm[row])
                assert torch.equal(one_row.norm, alone[0].norm)


def same_bits(one: Results, two: Results) -> bool:
    """True if all results are equal bit by bit, zeros' signs and NaNs included."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("form", range(3))
def test_one_shot_two_shot_and_the_local_kernel_give_the_same_bits(
    three: Built, form: int
) -> None:
    own = arguments_of(form, 5, 3, random.Random(form))
    expected = rank_order_reference([arguments.x for arguments in own], own[0])
    with three.ranks(seed=form) as ranks:
        given: dict[str, list[Results]] = {}
        for algorithm in ("one-shot", "two-shot"):
            given[algorithm] = [
                ranks.call(rank, call, algorithm) for rank, call in enumerate(own)
            ]
        given["local"] = [
            ranks.local_call(rank, call._replace(x=expected.reduced))
            for rank, call in enumerate(own)
        ]
        assert ranks.run() == 0
    for rank, call in enumerate(own):
        assert same_bits(given["one-shot"][rank], given["two-shot"][rank])
        local = given["local"][rank]
        # the local kernel gives back its input as the reduced value
        assert same_bits(given["one-shot"][rank]._replace(reduced=local.reduced), local)
        assert wrong(local, call, eager_lines(expected.reduced, call)) == []


@pytest.mark.parametrize("algorithm", ["one-shot", "two-shot", "local"])
@pytest.mark.parametrize("form", [1, 2])
def test_the_hidden_state_may_go_where_the_residual_is(
    three: Built, form: int, algorithm: str
) -> None:
    """Rows of several blocks, of chunks, and of a warp that is partly beyond their end."""
    for seed, tokens in enumerate((1, 9, 3)):
        own = arguments_of(form, tokens, 3, random.Random(seed))
        given: dict[bool, list[Results]] = {}
        with three.ranks(seed=seed) as ranks:
            for in_place in (False, True):
                given[in_place] = [
                    ranks.local_call(rank, call, in_place=in_place)
                    if algorithm == "local"
                    else ranks.call(rank, call, algorithm, in_place)
                    for rank, call in enumerate(own)
                ]
            assert ranks.run() == 0
        for one, two in zip(given[False], given[True], strict=True):
            assert same_bits(one, two)


def test_what_marks_an_empty_place_can_be_sent(three: Built) -> None:
    """NaNs of all payloads and zeros of both signs; none is waited for for ever."""
    own = calls_with_marks(1, 3)
    expected = rank_order_reference([arguments.x for arguments in own], own[0])
    with three.ranks() as ranks:
        for algorithm in ("one-shot", "two-shot") * 2:
            given = [ranks.call(rank, call, algorithm) for rank, call in enumerate(own)]
            assert ranks.run() == 0
            for results in given:
                assert results.reduced.isnan().equal(expected.reduced.isnan())
                numbers = ~expected.reduced.isnan()
                assert results.reduced[numbers].equal(expected.reduced[numbers])

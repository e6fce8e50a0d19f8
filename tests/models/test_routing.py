"""Noting and following the choices of experts, by which the zoo compares mixtures of experts."""

from __future__ import annotations

import pytest
import torch
from routing import Followed, Noted

SCORES = torch.tensor([[0.0, 4.0, 3.0, 2.0], [1.0, 0.5, 0.499, -4.0]])


def routed(scores: torch.Tensor) -> torch.Tensor:
    """The two best scores of each row, once by each spelling of topk."""
    first, _ = torch.topk(scores, 2, dim=-1)
    return first + scores.topk(2, dim=-1, sorted=False).values


def test_a_compiled_function_s_choices_are_noted_at_each_call() -> None:
    compiled = torch.compile(routed, backend="eager", fullgraph=True)
    for scores in (SCORES, SCORES.flip(1)):
        noted = Noted()
        with noted:
            compiled(scores)
        assert [one.tolist() for one in noted.choices] == [scores.topk(2).indices.tolist()] * 2


def test_a_run_that_follows_its_own_choices_is_the_same() -> None:
    noted = Noted()
    with noted:
        expected = routed(SCORES)
    followed = Followed(noted.choices)
    with followed:
        assert torch.equal(routed(SCORES), expected)
    followed.finish()
    assert (followed.differing, followed.shortfall) == (0, 0.0)


@pytest.mark.parametrize(
    ("second_row", "shortfall"), [([0, 2], 0.001 / 8), ([2, 1], 0.501 / 8), ([3, 0], 4.5 / 8)]
)
def test_another_choice_is_followed_and_measured(
    second_row: list[int], shortfall: float
) -> None:
    told = torch.tensor([[2, 1], second_row])
    followed = Followed([told])
    with followed:
        values, indices = SCORES.topk(2)
    assert torch.equal(indices, told)
    assert torch.equal(values, SCORES.gather(1, told))
    assert followed.differing == 1
    assert followed.shortfall == pytest.approx(shortfall, rel=1e-3)


def test_experts_that_are_out_of_the_question_can_not_be_chosen() -> None:
    followed = Followed([torch.tensor([[0, 1]])])
    with followed:
        torch.topk(torch.tensor([[1.0, -torch.inf, 0.5]]), 2)
    assert followed.shortfall == torch.inf


def test_choices_that_can_not_be_followed_are_refused() -> None:
    twice = torch.tensor([[1, 2], [0, 0]])
    with pytest.raises(AssertionError, match="chosen twice"), Followed([twice]):
        torch.topk(SCORES, 2)
    with pytest.raises(AssertionError, match="less often"), Followed([]):
        torch.topk(SCORES, 2)
    with pytest.raises(AssertionError, match="more often"):
        Followed([twice]).finish()

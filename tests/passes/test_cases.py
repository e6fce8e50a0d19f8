"""Every case's outcome under a fake group, and its results beside eager's.

A fake group's all_reduce changes nothing, so results can be compared, bit by bit, without a
second process; `test_cases_ranks` does so with real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import cases_graphs  # noqa: F401  (registers its cases, as do the following)
import cases_norms  # noqa: F401
import cases_reported
import cases_steps  # noqa: F401
import pytest
import torch
from case_runs import differences, tensors
from case_support import (
    CASES,
    HIDDEN,
    TOKENS,
    Case,
    Groups,
    all_reduce,
    fake_groups,
    part,
    rms_norm,
    shared,
    weight,
)
from graph_support import Looked, compile_and_look
from torch import nn

REPORTED = [c for c in CASES.values() if c.make.__module__ == cases_reported.__name__]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with fake_groups() as made:
        yield made


def looked_at(case: Case, groups: Groups, dynamic: bool = False) -> Looked:
    fn, args = case.make(groups, 0)
    if dynamic and not isinstance(fn, nn.Module):  # with weights as inputs, mark the tokens
        for tensor in args:
            if tensor.ndim > 1 and tensor.shape[0] == TOKENS:
                torch._dynamo.mark_dynamic(tensor, 0)
    everything = True if dynamic and isinstance(fn, nn.Module) else None
    found = compile_and_look(fn, *args, train=case.train, dynamic=everything)
    reasons = tuple(site.reason for site in found.sites if site.reason is not None)
    assert (found.fused_count, reasons) == (case.fused, case.reasons)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_stated_outcome(case: Case, groups: Groups) -> None:
    found = looked_at(case, groups)
    fn, args = case.make(groups, 0)
    with torch.no_grad():
        expected = list(tensors(fn(*args)))
    given = list(tensors(found.outputs))
    for a, b, kind in zip(given, expected, case.outputs, strict=True):
        faults = list(differences(a.detach(), b, kind, reordered=False))
        assert [fault for fault in faults if not fault.startswith("strides")] == []


@pytest.mark.parametrize(
    "case", [c for c in REPORTED if c.dynamic], ids=lambda case: str(case.name)
)
def test_the_same_outcome_with_dynamic_shapes(case: Case, groups: Groups) -> None:
    looked_at(case, groups, dynamic=True)


def test_one_compilation_serves_every_number_of_tokens(groups: Groups) -> None:
    w = weight()

    def fn(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = residual + all_reduce(x, groups.tp)
        return rms_norm(h, w), h

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = part(0, tokens, HIDDEN), shared(tokens, HIDDEN)
        for tensor in made:
            # mark_dynamic's symbol is at least 2; an unbacked one takes a single token too
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        return made

    found = compile_and_look(fn, *inputs(5))
    assert found.fused_count == 1
    with torch.no_grad():
        for tokens in (1, 2, 3, 17):
            given, expected = found.compiled(*inputs(tokens)), fn(*inputs(tokens))
            assert all(map(torch.equal, given, expected))
    assert len(found.graphs) == 1


def test_tokens_marked_dynamic_compile_once_and_once_more_for_one(groups: Groups) -> None:
    w = weight()

    def fn(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = residual.view(-1, HIDDEN) + all_reduce(x, groups.tp)
        return rms_norm(h, w).view(residual.shape), h

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = part(0, tokens, HIDDEN), shared(1, tokens, HIDDEN)
        torch._dynamo.mark_dynamic(made[0], 0)
        torch._dynamo.mark_dynamic(made[1], 1)
        return made

    found = compile_and_look(fn, *inputs(5))
    compiled = {}
    with torch.no_grad():
        for tokens in (2, 3, 17, 1):
            given, expected = found.compiled(*inputs(tokens)), fn(*inputs(tokens))
            assert all(map(torch.equal, given, expected))
            compiled[tokens] = len(found.graphs)
    assert compiled == {2: 1, 3: 1, 17: 1, 1: 2}
    assert found.fused_count == len(found.sites) == 2

"""Sites that write their hidden state over a residual nobody reads any more, and those that don't."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import in_place_jobs as jobs
import pytest
import torch
from graph_caches import caches_left_alone

from fx_fusion.lowering import inductor, ops
from fx_fusion.testing import fake_group, spawn


@pytest.fixture(autouse=True)
def other_tests_find_the_caches_on() -> Iterator[None]:
    with caches_left_alone():
        yield


@pytest.mark.parametrize("model", jobs.CASES, ids=lambda model: model.__name__)
def test_only_a_residual_that_dies_and_is_no_input_is_written_to(model: Any) -> None:
    with fake_group(2):  # which sums nothing up
        wrong, places = jobs.one_case(model)
    assert wrong == []
    assert places == jobs.CASES[model]


def test_layers_keep_one_buffer_for_the_hidden_state() -> None:
    for wrong, code, plain in spawn(jobs.layers_of_several_sizes, 2, timeout=240):
        assert wrong == []
        assert jobs.in_place(code) == (True,) * 4
        assert jobs.in_place(plain) == (False,) * 4
        assert jobs.buffers(code) == jobs.buffers(plain) - 1


def test_the_cpp_wrapper_writes_in_place_too() -> None:
    with fake_group(2):
        code, off = jobs.by_the_cpp_wrapper()
    assert off <= jobs.CLOSE
    calls = re.findall(r"std::array<AtenTensorHandle, 10>\{(.*?)\}", code)
    tensors = [call.split(", ") for call in calls if "buf" in call]
    # the first one's residual is an input; residual and hidden state by position
    assert [call[1] == call[7] for call in tensors] == [False, True]


@pytest.mark.parametrize(
    ("model", "place"), [(jobs.saved_for_backward, False), (jobs.not_saved, True)]
)
def test_a_residual_saved_for_backward_stays(model: Any, place: bool) -> None:
    with fake_group(2):
        assert jobs.trained(model) == ((place,), True)


def test_without_inductors_table_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of torch that has it elsewhere compiles as before."""
    monkeypatch.setitem(sys.modules, "torch._inductor.fx_passes.reinplace", None)
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("x", "residual")]
    node = graph.call_function(
        ops.all_reduce_add_rms_norm,
        (*inputs, None, None, 1e-6, "0", 2),
        {"want_residual": True},
    )
    inductor.offer_residuals(graph)
    assert node.target is ops.all_reduce_add_rms_norm
    monkeypatch.undo()
    inductor.offer_residuals(graph)
    assert node.target is ops.with_residual

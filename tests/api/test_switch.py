from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_support import Block, counts, fused_graphs, inputs, layer
from torch._functorch import config as functorch_config

import fx_fusion
from fx_fusion import switch
from fx_fusion.errors import SettingError
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.report import Reason
from fx_fusion.testing import fake_group

pytest_plugins = ["compile_fixtures"]
pytestmark = pytest.mark.usefixtures("compiling")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("true", True), ("TRUE", True), ("0", False), ("False", False), ("", False)],
)
def test_the_environment_variable_switches_off(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("FX_FUSION_DISABLE", value)
    assert switch.is_disabled() is expected


@pytest.mark.parametrize(
    "use",
    [
        switch.is_disabled,
        fx_fusion.inductor_options,
        lambda: fx_fusion.compile(layer),
        FusionPass().uuid,
    ],
)
def test_another_value_is_an_error_that_names_the_valid_ones(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[], object]
) -> None:
    monkeypatch.setenv("FX_FUSION_DISABLE", "on")
    with pytest.raises(SettingError, match=r"FX_FUSION_DISABLE='on' is neither.*1 or true"):
        use()


def test_blocks_nest_and_end() -> None:
    assert not switch.is_disabled()
    with fx_fusion.disable():
        with fx_fusion.disable():
            assert switch.is_disabled()
        assert switch.is_disabled()
        with fx_fusion.disable(False):
            assert not switch.is_disabled()
    assert not switch.is_disabled()


def test_the_block_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FUSION_DISABLE", "1")
    with fx_fusion.disable(False):
        assert not switch.is_disabled()


def test_an_error_ends_the_block() -> None:
    with pytest.raises(KeyError), fx_fusion.disable():
        raise KeyError
    assert not switch.is_disabled()


def test_it_decorates_functions() -> None:
    assert fx_fusion.disable()(switch.is_disabled)()


def test_another_thread_is_not_affected() -> None:
    seen: list[bool] = []
    with fx_fusion.disable():
        thread = threading.Thread(target=lambda: seen.append(switch.is_disabled()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_what_is_compiled_inside_stays_unfused_and_is_reported() -> None:
    with fake_group(4), torch.no_grad(), fused_graphs() as graphs:
        compiled = torch.compile(layer, backend="fx_fusion")
        with fx_fusion.disable():
            compiled(*inputs())
        compiled(*inputs())
    assert [counts(ops) for ops in graphs] == [(0, 1)]
    (report,) = fx_fusion.reports()
    assert [site.reason for site in report.sites] == [Reason.DISABLED]


def test_it_is_part_of_the_cache_key() -> None:
    with fake_group(4), torch.no_grad(), fused_graphs() as graphs:
        with fx_fusion.disable():
            torch.compile(layer, backend="fx_fusion")(*inputs())
        torch._dynamo.reset()
        torch.compile(layer, backend="fx_fusion")(*inputs())
        torch._dynamo.reset()
        with fx_fusion.disable():
            torch.compile(layer, backend="fx_fusion")(*inputs())
    # The third one came from the cache, and is the first one.
    assert [counts(ops) for ops in graphs] == [(0, 1), (1, 0)]
    assert [report.fused_count for report in fx_fusion.reports()] == [0, 1, 0]


@pytest.mark.parametrize("through", ["backend", "options"])
def test_a_backward_graph_compiled_later_keeps_the_state_of_its_forward(through: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 32)
    seen: list[bool] = []

    class Watching(FusionPass):
        def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
            seen.append(switch.is_disabled_for_compile())
            super().__call__(graph, is_inference)

    with fake_group(4), functorch_config.patch(enable_autograd_cache=False):
        options: dict[str, Any] = {"post_grad_custom_post_pass": Watching()}
        if through == "backend":
            compiled = torch.compile(Block(), backend="fx_fusion")
        else:
            compiled = torch.compile(Block(), options=options)
        with fx_fusion.disable():
            loss = compiled(x, x).sum()
        before = len(fx_fusion.reports())
        assert before == 1, "the backward graph is meant to be compiled by backward()"
        loss.backward()
    forward, backward = fx_fusion.reports()
    assert [site.reason for site in forward.sites] == [Reason.DISABLED]
    assert [site.reason for site in backward.sites] == [Reason.DISABLED] * len(backward.sites)
    assert seen == ([True, True] if through == "options" else [])

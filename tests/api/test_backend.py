from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_support import Block, counts, fused_graphs, inputs, layer
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config

import fx_fusion
from fx_fusion import compat
from fx_fusion.backend import fx_fusion as backend
from fx_fusion.composite import CompositePass
from fx_fusion.errors import SettingError
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.settings import FusionSettings
from fx_fusion.testing import fake_group

pytest_plugins = ["compile_fixtures"]
pytestmark = pytest.mark.usefixtures("compiling")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Inductor would be given, for each graph; nothing is compiled."""
    seen: list[dict[str, Any]] = []

    def watched(gm: Any, example_inputs: Any, options: Any) -> Callable[..., Any]:
        seen.append(dict(options))
        forward: Callable[..., Any] = gm.forward
        return forward

    monkeypatch.setattr(compat, "compile_with_inductor", watched)
    return seen


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def options_given(given: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.compile(double, backend="fx_fusion", **how)(torch.ones(2))
    return given[-1]


def test_a_site_is_fused_and_nothing_is_left_of_its_all_reduce() -> None:
    with fake_group(4), torch.no_grad(), fused_graphs() as graphs:
        torch.compile(layer, backend="fx_fusion", fullgraph=True)(*inputs())
    assert [counts(ops) for ops in graphs] == [(1, 0)]
    (report,) = fx_fusion.reports()
    assert (report.fused_count, report.site_count) == (1, 1)
    assert report.graphs[0].kind == "inference"


def test_a_training_step_is_fused_forward_and_reported_for_both_graphs() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 32)
    with fake_group(4), fused_graphs() as graphs:
        torch.compile(Block(), backend="fx_fusion")(x, x).sum().backward()
    assert [counts(ops)[0] for ops in graphs] == [1, 0]
    forward, backward = fx_fusion.reports()
    assert [report.graphs[0].kind for report in (forward, backward)] == ["forward", "backward"]
    assert (forward.fused_count, forward.site_count) == (1, 1)
    assert backward.site_count == 0  # its all_reduce is the gradient's


def test_dynamic_tokens_need_one_graph() -> None:
    block = Block()
    with fake_group(4), torch.no_grad():
        compiled = torch.compile(block, backend="fx_fusion", dynamic=True)
        for tokens in (2, 5, 9):
            x = torch.randn(tokens, 32)
            torch.testing.assert_close(compiled(x, x), block(x, x))
    (report,) = fx_fusion.reports()
    assert report.fused_count == 1


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "reduce-overhead"])
def test_mode_means_what_it_means_to_inductor(given: list[Any], mode: str) -> None:
    expected = compat.mode_options(mode)
    for how in ({"mode": mode}, {"options": {"mode": mode}}):
        options = options_given(given, **how)
        assert {name: options[name] for name in expected} == expected


def test_an_explicit_option_wins_over_those_of_the_mode(given: list[Any]) -> None:
    how = {"mode": "max-autotune-no-cudagraphs", "max_autotune": False}
    options = options_given(given, options=how)
    assert options["max_autotune"] is False
    assert options["coordinate_descent_tuning"] is True


def test_two_different_modes_are_an_error() -> None:
    gm = torch.fx.symbolic_trace(double)
    with pytest.raises(SettingError, match=r"'lite'.*'max-autotune'.*give the mode once"):
        backend(gm, [torch.ones(2)], mode="lite", options={"mode": "max-autotune"})


def test_inductor_s_options_pass_through_with_dashes_or_underscores(given: list[Any]) -> None:
    options = options_given(
        given, options={"epilogue-fusion": False, "triton.cudagraphs": False}
    )
    assert options["epilogue_fusion"] is False
    assert options["triton.cudagraphs"] is False


def test_our_options_reach_the_pass_under_either_name(given: list[Any]) -> None:
    for name in ("merge_all_reduces", "merge-all-reduces", "fx_fusion.merge_all_reduces"):
        options = options_given(given, options={name: True})
        expected = FusionPass(FusionSettings(merge_all_reduces=True))
        assert options == {compat.POST_PASS: expected}


def test_a_name_of_both_reaches_both_and_the_long_name_only_us(given: list[Any]) -> None:
    ours = {compat.POST_PASS: FusionPass(FusionSettings(deterministic=True))}
    both = options_given(given, options={"deterministic": True})
    assert both == {**ours, "deterministic": True}
    assert options_given(given, options={"fx_fusion.deterministic": True}) == ours


def test_one_option_given_twice_with_two_values_is_an_error() -> None:
    gm = torch.fx.symbolic_trace(double)
    options = {"merge_all_reduces": True, "fx_fusion.merge_all_reduces": False}
    with pytest.raises(SettingError, match="'merge_all_reduces' is given twice"):
        backend(gm, [torch.ones(2)], options=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge_all_reduce": True}, "Did you mean 'merge_all_reduces'"),
        ({"max_autotun": True}, "Did you mean 'max_autotune'"),
        ({"kernel": "one_shot_please"}, "is not a kernel: choose one of"),
        ({"mode": "max-autotun"}, "'max-autotun' is not a mode. Did you mean 'max-autotune'"),
        ({"target": fx_fusion.Target()}, "for fx_fusion.explain alone"),
        # torch's own check of an option's type
        (
            {"max_autotune": "yes"},
            "Unexpected type of attr max_autotune, got str should be bool",
        ),
    ],
)
def test_a_bad_option_is_an_error_that_torch_compile_shows(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(double, backend="fx_fusion", options=options)(torch.ones(2))


def test_the_user_s_pass_in_the_global_config_is_kept() -> None:
    seen: list[tuple[int, int]] = []

    def users_pass(graph: torch.fx.Graph) -> None:
        seen.append(counts([str(node.target) for node in graph.nodes]))

    with fake_group(4), torch.no_grad(), config.patch({compat.POST_PASS: users_pass}):
        torch.compile(layer, backend="fx_fusion")(*inputs())
        assert getattr(config, compat.POST_PASS) is users_pass
    assert seen == [(0, 1)]  # it came before ours
    assert fx_fusion.reports()[0].fused_count == 1


def test_the_global_config_is_read_when_a_graph_is_compiled(given: list[Any]) -> None:
    def users_pass(graph: torch.fx.Graph) -> None: ...

    compiled = torch.compile(double, backend="fx_fusion")
    with config.patch({compat.POST_PASS: users_pass}):
        compiled(torch.ones(2))
    assert given[-1] == {compat.POST_PASS: CompositePass((users_pass, FusionPass()))}


def test_the_function_itself_is_a_backend_too() -> None:
    with fake_group(4), torch.no_grad():
        torch.compile(layer, backend=backend)(*inputs())
    assert fx_fusion.reports()[0].fused_count == 1


def test_it_can_be_the_default_backend() -> None:
    set_default = getattr(torch.compiler, "set_default_backend", None)
    if set_default is None:
        pytest.skip("torch.compiler.set_default_backend came with torch 2.13")
    set_default("fx_fusion")
    try:
        with fake_group(4), torch.no_grad():
            torch.compile(layer)(*inputs())
    finally:
        set_default(None)
    assert fx_fusion.reports()[0].fused_count == 1

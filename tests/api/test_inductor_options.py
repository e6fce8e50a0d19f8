from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_support import counts, inputs, layer, targets
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fx_fusion
from fx_fusion import compat, inductor_options
from fx_fusion.composite import CompositePass
from fx_fusion.errors import SettingError
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.settings import FusionSettings
from fx_fusion.testing import fake_group

pytest_plugins = ["compile_fixtures"]
pytestmark = pytest.mark.usefixtures("compiling")

POST = compat.POST_PASS


class Noting(CustomGraphPass):
    """A user's pass that notes what it was called with."""

    def __init__(self, name: str, identity: Any = None) -> None:
        self.name = name
        self.identity = name if identity is None else identity
        self.calls: list[tuple[int, int]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls.append(counts(targets(graph)))

    def uuid(self) -> Any:
        return self.identity


class AwareNoting(compat.InferenceAwarePass):
    """A user's pass of the kind that is told whether the graph is for inference."""

    def __init__(self) -> None:
        self.told: list[bool | None] = []

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        self.told.append(is_inference)

    def uuid(self) -> Any:
        return "aware"


def plain(graph: torch.fx.Graph) -> None:
    """A user's pass that is a function."""


def members(options: dict[str, Any]) -> tuple[Any, ...]:
    slot = options[POST]
    return slot.members if isinstance(slot, CompositePass) else (slot,)


def compile_layer(options: dict[str, Any], training: bool = False) -> None:
    with fake_group(4):
        norm, hidden = torch.compile(layer, options=options)(*inputs(training))
        if training:
            torch.autograd.backward((norm + hidden).sum())


def test_alone_it_is_one_option() -> None:
    assert inductor_options() == {POST: FusionPass()}
    settings = FusionSettings(merge_all_reduces=True)
    assert inductor_options(merge_all_reduces=True) == {POST: FusionPass(settings)}


def test_options_and_mode_are_kept_and_the_given_dict_is_not_changed() -> None:
    given = {"max-autotune": False, "epilogue_fusion": True}
    before = dict(given)
    options = inductor_options(given, mode="max-autotune-no-cudagraphs")
    assert given == before
    assert options.pop(POST) == FusionPass()
    assert options == {
        "max_autotune": False,
        "coordinate_descent_tuning": True,
        "epilogue_fusion": True,
    }
    assert inductor_options({"mode": "lite"}) == inductor_options(mode="lite")


@pytest.mark.parametrize(
    "slot", [plain, [plain], (plain,), CompositePass((plain,)), [CompositePass((plain,))]]
)
def test_what_stands_in_the_slot_stays_there_before_ours(slot: Any) -> None:
    assert members(inductor_options({POST: slot})) == (plain, FusionPass())


def test_several_passes_keep_their_order() -> None:
    first, second = Noting("first"), Noting("second")
    options = inductor_options({POST: [first, plain, second]})
    assert members(options) == (first, plain, second, FusionPass())


def test_the_global_config_is_used_where_options_say_nothing() -> None:
    with config.patch({POST: plain}):
        assert members(inductor_options()) == (plain, FusionPass())
        assert members(inductor_options({POST: None})) == (FusionPass(),)
        other = Noting("other")
        assert members(inductor_options({POST: other})) == (other, FusionPass())


def test_wrapping_twice_changes_nothing() -> None:
    once = inductor_options({POST: plain}, mode="lite", deterministic=True)
    assert inductor_options(once) == once
    alone = inductor_options(kernel="unfused")
    assert inductor_options(alone) == alone


def test_a_setting_given_again_replaces_the_earlier_one_and_the_others_stay() -> None:
    once = inductor_options({POST: plain}, deterministic=True, kernel="unfused")
    again = inductor_options(once, kernel="auto", merge_all_reduces=True)
    settings = FusionSettings(kernel="auto", merge_all_reduces=True, deterministic=True)
    assert members(again) == (plain, FusionPass(settings))


def test_a_pass_of_ours_among_the_user_s_moves_to_the_end() -> None:
    slot = [FusionPass(FusionSettings(deterministic=True)), plain]
    assert members(inductor_options({POST: slot})) == (
        plain,
        FusionPass(FusionSettings(deterministic=True)),
    )


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((), {"merge_all_reduce": True}, "Did you mean 'merge_all_reduces'"),
        ((), {"mode": "fast"}, "'fast' is not a mode"),
        (({"mode": "lite"},), {"mode": "default"}, "give the mode once"),
        (({"max_autotun": True},), {}, "Did you mean 'max_autotune'"),
        (({"merge_all_reduces": True},), {}, "give it to inductor_options by keyword"),
        (({POST: 3},), {}, "holds 3, which can't be called"),
        ((), {"target": fx_fusion.Target()}, "for fx_fusion.explain alone"),
        ((), {"deterministic": 1}, "deterministic=1 must be True or False"),
    ],
)
def test_mistakes_are_errors_at_once(
    arguments: tuple[Any, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        inductor_options(*arguments, **settings)


def test_the_user_s_passes_run_first_and_in_order() -> None:
    first, second = Noting("first"), Noting("second")
    with torch.no_grad():
        compile_layer(inductor_options({POST: [first, second]}))
    assert first.calls == second.calls == [(0, 1)]
    (report,) = fx_fusion.reports()
    assert report.fused_count == 1
    assert report.notes == ()


def test_each_pass_is_told_what_inductor_would_tell_it() -> None:
    aware, unaware = AwareNoting(), Noting("unaware")
    compile_layer(inductor_options({POST: [aware, unaware]}), training=True)
    # 2.11 has no such passes and tells nothing.
    told = compat.is_inference_aware(aware)
    assert aware.told == ([False, False] if told else [None, None])
    assert len(unaware.calls) == 2
    kinds = [report.graphs[0].kind for report in fx_fusion.reports()]
    assert kinds == ["forward", "backward"]


def test_equal_options_compile_once() -> None:
    with fake_group(4), torch.no_grad():
        for _ in range(2):
            torch.compile(layer, options=inductor_options(deterministic=True))(*inputs())
    assert len(fx_fusion.reports()) == 1


def test_a_mode_that_runs_no_passes_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    inductor_options(mode="default")
    assert caplog.messages == []
    inductor_options(mode="lite")
    (message,) = caplog.messages
    assert "fuses nothing" in message
    assert "use_post_grad_passes=False (part of mode 'lite')" in message
    inductor_options({"use_post_grad_passes": True}, mode="lite")
    assert len(caplog.messages) == 1


def test_the_uuid_is_that_of_all_members() -> None:
    first, second = Noting("first"), Noting("second")
    slot = inductor_options({POST: [first, second]})[POST]
    assert slot.uuid() == ("first", "second", FusionPass().uuid())
    turned = inductor_options({POST: [second, first]})[POST]
    assert turned.uuid() != slot.uuid()


class WithoutUuid(Noting):
    def uuid(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("users_pass", "name"), [(plain, "plain"), (WithoutUuid("x"), "WithoutUuid")]
)
def test_a_pass_without_a_uuid_turns_caching_off_and_the_report_says_so(
    users_pass: Any, name: str
) -> None:
    options = inductor_options({POST: [Noting("fine"), users_pass]})
    assert options[POST].uuid() is None
    with torch.no_grad():
        compile_layer(options)
    (report,) = fx_fusion.reports()
    (note,) = report.notes
    assert note.startswith(f"Nothing is cached: the custom pass {name} has no uuid;")
    assert compat.inductor_counters()["fxgraph_cache_bypass"] == 1


def test_a_pass_without_a_uuid_in_another_slot_is_noted_as_well() -> None:
    with torch.no_grad():
        compile_layer(inductor_options({"joint_custom_post_pass": plain}))
    (note,) = fx_fusion.reports()[0].notes
    assert "the custom pass plain has no uuid" in note


def test_nothing_is_noted_where_caching_is_off_anyway() -> None:
    with torch.no_grad(), config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        compile_layer(inductor_options({POST: plain}))
    assert fx_fusion.reports()[0].notes == ()


def test_a_list_of_the_user_s_own_with_our_pass_in_it_works() -> None:
    if compat.versions()[0].split(".")[:2] in (["2", "11"], ["2", "12"]):
        pytest.skip("Inductor takes a list in the slot from torch 2.13 on")
    with torch.no_grad():
        compile_layer({POST: [plain, FusionPass()]})
    (report,) = fx_fusion.reports()
    assert report.fused_count == 1
    assert "the custom pass plain has no uuid" in report.notes[0]

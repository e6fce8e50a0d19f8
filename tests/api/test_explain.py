"""explain: what a call's graphs are, what became of their sites, and where the view ends."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fusion
from fx_fusion import Reason, Target
from fx_fusion.errors import GroupError, SettingError
from fx_fusion.testing import fake_group

HIDDEN = 16
FILE = Path(__file__).name


@pytest.fixture
def group() -> Iterator[None]:
    with fake_group(8):
        yield


class Layer(nn.Module):
    """A row-parallel projection with its residual and norm; `between` runs after the first."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.second = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.between = between

    def part(self, projection: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = projection(x)
        dist.all_reduce(y)
        return x + y

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.norm(self.part(self.first, x))
        if self.between is not None:
            hidden = self.between(hidden)
        return self.norm(self.part(self.second, hidden))


def tokens(count: int = 4) -> torch.Tensor:
    return torch.ones(count, HIDDEN)


def line_of(fn: Callable[..., Any], text: str) -> str:
    """Where a line of `fn` is, as reports write it."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = (index for index, line in enumerate(lines) if text in line)
    return f"{FILE}:{first + offset} in {fn.__name__}"


def with_break(hidden: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return hidden


def with_item(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * hidden.sum().item()


def with_condition(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.sum() > 0:
        hidden = hidden + 1
    return hidden


def with_nonzero(hidden: torch.Tensor) -> torch.Tensor:
    chosen = hidden[hidden.sum(-1) > 0]
    return hidden * chosen.shape[0]


@pytest.mark.usefixtures("group")
class TestGraphs:
    def test_each_site_is_reported_with_its_place_and_facts(self) -> None:
        with torch.no_grad():
            report = fx_fusion.explain(Layer())(tokens())
        assert (report.fused_count, report.site_count) == (2, 2)
        assert [graph.kind for graph in report.graphs] == ["inference"]
        site = report.sites[0]
        assert site.source == line_of(Layer.part, "dist.all_reduce")
        assert (site.shape, site.dtype) == ((4, HIDDEN), "float32")
        assert (site.group, site.world_size) == ("0", 8)
        assert site.kernel == "one-shot over shared memory"
        assert report.incomplete == ""

    def test_training_shows_both_graphs_and_gradients_stay_out_of_the_count(self) -> None:
        report = fx_fusion.explain(Layer())(tokens())
        assert [graph.kind for graph in report.graphs] == ["forward", "backward"]
        assert (report.fused_count, report.site_count) == (2, 2)
        assert report.reasons() == {Reason.GRADIENT: 2}

    def test_a_refusal_has_its_reason_and_numbers(self) -> None:
        def broadcast(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            y = x * 2
            dist.all_reduce(y)
            return F.rms_norm(residual + y, (HIDDEN,))

        report = fx_fusion.explain(broadcast)(tokens(), tokens(1))
        assert [site.reason for site in report.sites] == [Reason.RESIDUAL_SHAPE]
        assert report.sites[0].numbers["residual"] == f"[1, {HIDDEN}]"
        assert str(report).startswith("0 of 1 site fused")

    def test_a_graph_break_makes_two_graphs_of_one_report(self) -> None:
        with torch.no_grad():
            report = fx_fusion.explain(Layer(with_break))(tokens())
        assert [len(graph.sites) for graph in report.graphs] == [1, 1]
        assert report.fused_count == 2
        # Dynamo calls what follows the break torch_dynamo_resume_in_..., the report doesn't.
        assert {site.source for site in report.sites} == {
            line_of(Layer.part, "dist.all_reduce")
        }

    def test_a_graph_break_is_an_error_under_fullgraph(self) -> None:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            fx_fusion.explain(Layer(with_break), fullgraph=True)(tokens())

    def test_a_value_that_is_needed_is_an_error_under_fullgraph(self) -> None:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            fx_fusion.explain(Layer(with_condition), fullgraph=True)(tokens())

    def test_dynamic_sizes_stay_symbols(self) -> None:
        with torch.no_grad():
            report = fx_fusion.explain(Layer(), dynamic=True)(tokens())
        assert report.fused_count == 2
        assert isinstance(report.sites[0].shape[0], str)

    def test_marks_on_the_real_tensors_are_heeded(self) -> None:
        x = tokens()
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            report = fx_fusion.explain(Layer())(x)
        assert isinstance(report.sites[0].shape[0], str)

    def test_sizes_of_earlier_calls_do_not_matter(self) -> None:
        explained = fx_fusion.explain(Layer())
        with torch.no_grad():
            shapes = [explained(tokens(count)).sites[0].shape for count in (4, 6, 8)]
        assert shapes == [(4, HIDDEN), (6, HIDDEN), (8, HIDDEN)]

    @pytest.mark.parametrize("between", [with_item, with_condition, with_nonzero])
    def test_where_a_value_is_needed_the_view_ends_and_what_was_seen_stays(
        self, between: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        with torch.no_grad():
            report = fx_fusion.explain(Layer(between))(tokens())
        assert report.fused_count == 1
        place = line_of(between, "hidden.sum(")
        assert report.incomplete == f"{place}: the value of a tensor is needed here"

    def test_the_user_s_own_errors_come_through(self) -> None:
        def wrong(x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            raise ValueError("this is the user's")

        with pytest.raises(ValueError, match="this is the user's"):
            fx_fusion.explain(wrong)(tokens())

    def test_arguments_may_be_nested_and_named(self) -> None:
        def fn(pair: dict[str, list[torch.Tensor]], *, weight: torch.Tensor) -> torch.Tensor:
            y = pair["parts"][0] * 2
            dist.all_reduce(y)
            return F.rms_norm(pair["parts"][1] + y, (HIDDEN,), weight)

        report = fx_fusion.explain(fn)({"parts": [tokens(), tokens()]}, weight=tokens(1)[0])
        assert report.fused_count == 1

    def test_the_switch_is_heeded(self) -> None:
        with fx_fusion.disable(), torch.no_grad():
            report = fx_fusion.explain(Layer())(tokens())
        assert report.reasons() == {Reason.DISABLED: 2}


@pytest.mark.usefixtures("group")
class TestWhatIsExplained:
    """Whatever a function has been made into, its own code is looked at."""

    def count(self, fn: Callable[..., Any], *args: Any) -> int:
        with torch.no_grad():
            return fx_fusion.explain(fn)(*(args or (tokens(),))).fused_count

    def test_a_compiled_module(self) -> None:
        assert self.count(torch.compile(Layer(), backend="eager")) == 2

    def test_a_module_compiled_in_place_and_its_parts(self) -> None:
        inner = Layer()
        inner.compile(backend="eager")
        outer = nn.Sequential(inner)
        outer.compile(backend="eager")
        assert self.count(outer) == 2
        assert inner._compiled_call_impl is not None

    def test_a_compiled_function(self) -> None:
        assert self.count(torch.compile(Layer().forward, backend="eager")) == 2

    def test_a_bound_method(self) -> None:
        assert self.count(Layer().forward) == 2

    def test_a_partial(self) -> None:
        assert self.count(functools.partial(Layer.forward, Layer())) == 2

    def test_an_object_that_holds_a_model(self) -> None:
        class Runner:
            def __init__(self) -> None:
                with torch.device("meta"):
                    self.model = Layer()

            def run(self, x: torch.Tensor) -> Any:
                return self.model(x)

        assert self.count(Runner().run) == 2

    def test_a_class_decorated_by_fx_fusion(self) -> None:
        @fx_fusion.compile(dynamic=True)
        class Decorated(Layer):
            def forward(self, x: torch.Tensor) -> Any:
                return super().forward(x)

        assert self.count(Decorated()) == 2

    def test_something_else_is_refused_at_once(self) -> None:
        with pytest.raises(SettingError, match="takes a function"):
            fx_fusion.explain(3)  # type: ignore[arg-type]

    def test_a_model_on_the_meta_device(self) -> None:
        with torch.device("meta"):
            model = Layer()
        assert self.count(model) == 2
        assert {p.device.type for p in model.parameters()} == {"meta"}

    def test_a_model_made_of_fake_tensors(self) -> None:
        with FakeTensorMode() as mode:
            model, x = Layer(), tokens()
        assert self.count(model, x) == 2
        assert not mode.allow_non_fake_inputs
        with mode:
            assert self.count(model, tokens()) == 2


@pytest.mark.usefixtures("group")
class TestSettings:
    def test_a_target_gives_world_size_and_architecture(self) -> None:
        target = Target(arch="sm_90", world_size=4)
        with torch.no_grad():
            report = fx_fusion.explain(Layer(), target=target, kernel="aiter")(tokens())
        assert {site.world_size for site in report.sites} == {4}
        assert report.sites[0].reason is Reason.KERNEL_UNAVAILABLE
        assert report.sites[0].numbers["arch"] == "sm_90"
        assert report.sites[0].numbers["world_size"] == 4

    def test_a_target_without_a_world_size_takes_the_group_s(self) -> None:
        with torch.no_grad():
            report = fx_fusion.explain(Layer(), target=Target(arch="gfx942"))(tokens())
        assert {site.world_size for site in report.sites} == {8}

    def test_an_unknown_setting_is_refused_at_once_with_the_nearest_one(self) -> None:
        with pytest.raises(SettingError, match="Did you mean 'merge_all_reduces'"):
            fx_fusion.explain(Layer(), merge_allreduces=True)

    def test_an_unknown_option_of_inductor_is_refused_at_once(self) -> None:
        with pytest.raises(SettingError, match="max_autotune"):
            fx_fusion.explain(Layer(), options={"max_autotun": True})

    def test_settings_among_the_options_hold_unless_given_again(self) -> None:
        options = fx_fusion.inductor_options(kernel="aiter")
        with torch.no_grad():
            report = fx_fusion.explain(Layer(), options=options)(tokens())
            assert report.reasons() == {Reason.KERNEL_UNAVAILABLE: 2}
            again = fx_fusion.explain(Layer(), options=options, kernel="unfused")(tokens())
        assert again.fused_count == 2

    def test_the_user_s_own_passes_come_first(self) -> None:
        seen: list[int] = []

        def custom(graph: fx.Graph) -> None:
            reduces = torch.ops._c10d_functional.all_reduce.default
            seen.append(len(graph.find_nodes(op="call_function", target=reduces)))

        options = {"post_grad_custom_post_pass": custom}
        with torch.no_grad():
            report = fx_fusion.explain(Layer(), options=options, mode="max-autotune")(tokens())
        assert seen == [2]
        assert report.fused_count == 2
        assert any("no uuid" in note for note in report.notes)


def test_without_a_group_the_report_says_how_to_make_one() -> None:
    report = fx_fusion.explain(lambda x: x * 2)(tokens())
    assert report.site_count == 0
    assert "fx_fusion.testing.fake_group(8)" in str(report)


def test_code_that_needs_a_group_fails_with_how_to_make_one() -> None:
    with pytest.raises(GroupError, match=r"fake_group\(8\)"):
        fx_fusion.explain(Layer())(tokens())


@pytest.mark.usefixtures("group")
def test_a_call_without_tensors_says_that_nothing_is_compiled() -> None:
    report = fx_fusion.explain(lambda x: x + 1)(1)
    assert report.site_count == 0
    assert "found nothing to compile" in str(report)

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from compile_support import HIDDEN, Block, inputs, layer
from torch import nn
from typing_extensions import assert_type

import fx_fusion
from fx_fusion import compat
from fx_fusion.errors import SettingError
from fx_fusion.testing import fake_group

pytest_plugins = ["compile_fixtures"]
pytestmark = pytest.mark.usefixtures("compiling")


def plain(x: torch.Tensor, residual: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    """A function to compile."""
    return layer(x, residual, weight)[0]


@fx_fusion.compile
def bare(x: torch.Tensor, residual: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    """Decorated without parentheses."""
    return layer(x, residual, weight)[0]


@fx_fusion.compile(fullgraph=True, merge_all_reduces=True)
def called(x: torch.Tensor, residual: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    """Decorated with parentheses."""
    return layer(x, residual, weight)[0]


class Methods(nn.Module):
    """Methods of every kind, compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    @fx_fusion.compile(dynamic=True)
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The forward of a model."""
        return layer(x, residual, self.weight)[0]

    @fx_fusion.compile
    @staticmethod
    def static(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A static method."""
        return layer(x, residual, weight)[0]

    @fx_fusion.compile
    @classmethod
    def of_class(
        cls, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """A class method."""
        assert cls is Methods
        return layer(x, residual, weight)[0]


def fused() -> list[int]:
    """The number of fused sites of each graph since the last call."""
    found = [report.fused_count for report in fx_fusion.reports()]
    fx_fusion.clear_reports()
    return found


@pytest.mark.parametrize("function", [bare, called, fx_fusion.compile(plain)])
def test_a_function_is_compiled_and_keeps_its_face(function: Any) -> None:
    x, residual, weight = inputs()
    with fake_group(4), torch.no_grad():
        output = function(x, residual, weight=weight)
        assert fused() == [1]
        torch.testing.assert_close(output, plain(x, residual, weight=weight))
    assert inspect.signature(function) == inspect.signature(plain)
    assert function.__doc__ == inspect.unwrap(function).__doc__
    assert function.__name__ in ("bare", "called", "plain")
    assert function.__module__ == __name__


def test_the_types_a_checker_sees_are_the_undecorated_ones() -> None:
    class Local(Block):
        pass

    x, residual, weight = inputs()
    with fake_group(4), torch.no_grad():
        assert_type(bare(x, residual, weight=weight), torch.Tensor)
        assert_type(called(x, residual, weight=weight), torch.Tensor)
        assert_type(fx_fusion.compile(Block()), Block)
        assert_type(fx_fusion.compile(Local), type[Local])
        assert_type(Methods().forward(x, residual), torch.Tensor)


def test_a_method_is_compiled_for_any_number_of_tokens() -> None:
    model = Methods()
    with fake_group(4), torch.no_grad():
        for tokens in (2, 3, 7):
            x, residual, _ = inputs(tokens=tokens)
            torch.testing.assert_close(
                model(x, residual), plain(x, residual, weight=model.weight)
            )
    assert fused() == [1]
    assert list(inspect.signature(model.forward).parameters) == ["x", "residual"]
    assert Methods.forward.__doc__ == "The forward of a model."


def test_static_and_class_methods_are_compiled() -> None:
    x, residual, weight = inputs()
    with fake_group(4), torch.no_grad():
        Methods.static(x, residual, weight)
        Methods().static(x, residual, weight)
        Methods.of_class(x, residual, weight)
    assert fused() == [1, 1]


def test_a_module_s_class_has_its_forward_compiled_and_is_returned_itself() -> None:
    class Local(Block):
        """A block of its own."""

    returned = fx_fusion.compile(fullgraph=True)(Local)
    assert returned is Local
    assert (Local.__name__, Local.__doc__) == ("Local", "A block of its own.")
    model = Local()
    assert isinstance(model, Block)
    assert sorted(model.state_dict()) == ["norm.weight", "projection.weight"]
    x, residual, _ = inputs()
    with fake_group(4), torch.no_grad():
        model(x, residual)
        assert fused() == [1]
        Block()(x, residual)  # the parent is as it was
    assert fused() == []


def test_a_subclass_calls_the_compiled_forward_of_its_parent() -> None:
    @fx_fusion.compile
    class Parent(Block):
        pass

    class Child(Parent):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return super().forward(x, residual) + 1

    x, residual, _ = inputs()
    with fake_group(4), torch.no_grad():
        Child()(x, residual)
    assert fused() == [1]


def test_a_module_is_compiled_in_place() -> None:
    model = Block()
    assert fx_fusion.compile(model, fullgraph=True) is model
    assert type(model) is Block
    assert sorted(model.state_dict()) == ["norm.weight", "projection.weight"]
    x, residual, _ = inputs()
    with fake_group(4), torch.no_grad():
        model(x, residual)
    assert fused() == [1]


def test_compiling_again_replaces_what_was_compiled() -> None:
    class Local(Block):
        pass

    x, residual, weight = inputs()
    with fake_group(4), torch.no_grad():
        fx_fusion.compile(fx_fusion.compile(Local), deterministic=True)()(x, residual)
        assert fused() == [1]
        fx_fusion.compile(bare, deterministic=True)(x, residual, weight=weight)
        assert fused() == [1]


def test_a_bound_method_is_compiled() -> None:
    model = Block()
    x, residual, _ = inputs()
    with fake_group(4), torch.no_grad():
        fx_fusion.compile(model.forward)(x, residual)
    assert fused() == [1]


def test_everything_reaches_inductor_with_mode_and_options_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []

    def watched(gm: Any, example_inputs: Any, options: Any) -> Any:
        seen.append(dict(options))
        return gm.forward

    monkeypatch.setattr(compat, "compile_with_inductor", watched)

    @fx_fusion.compile(
        mode="max-autotune-no-cudagraphs",
        options={"max-autotune": False, "epilogue_fusion": False},
        deterministic=True,
        kernel="unfused",
    )
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    double(torch.ones(2))
    settings = fx_fusion.FusionSettings(kernel="unfused", deterministic=True)
    (options,) = seen
    assert options.pop(compat.POST_PASS).settings == settings
    assert options == {
        "max_autotune": False,
        "coordinate_descent_tuning": True,
        "epilogue_fusion": False,
    }


def test_disable_leaves_the_target_as_it_is() -> None:
    x, residual, weight = inputs()
    with fake_group(4), torch.no_grad():
        fx_fusion.compile(plain, disable=True)(x, residual, weight=weight)
    assert fused() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"merge_all_reduce": True}, "Did you mean 'merge_all_reduces'"),
        ({"dynamc": True}, "'dynamc' is not a fx_fusion option"),
        ({"mode": "max-autotun"}, "Did you mean 'max-autotune'"),
        ({"options": {"max_autotun": True}}, "Did you mean 'max_autotune'"),
        ({"mode": "lite", "options": {"mode": "default"}}, "give the mode once"),
        ({"kernel": "fastest"}, "is not a kernel"),
    ],
)
def test_mistakes_are_errors_when_decorating(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        fx_fusion.compile(plain, **arguments)
    with pytest.raises(SettingError, match=message):
        fx_fusion.compile(**arguments)


@pytest.mark.parametrize("target", [3, "model", int])
def test_what_cannot_be_compiled_is_an_error(target: Any) -> None:
    with pytest.raises(SettingError, match=r"an nn\.Module"):
        fx_fusion.compile(target)

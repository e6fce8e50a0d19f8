"""What the op refuses, in its real and its fake implementation, and what it says then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_support import BF16, FP32, arguments_for, call, shared
from torch._subclasses.fake_tensor import FakeTensorMode

from fx_fusion.errors import GradientError, GroupError, WorldSizeError
from fx_fusion.lowering import ops
from fx_fusion.testing import fake_group


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_group(2):
        yield


def arguments(**changed: Any) -> Any:
    """Valid arguments with some of them changed."""
    x = changed.pop("x", shared(3, 16))
    return arguments_for(x, **{"weight": shared(16), **changed})


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "weight_form_unknown": ({"weight_form": "w+1"}, "'w\\+1' is unknown; choose .*1\\+w"),
    "reciprocal_unknown": ({"reciprocal": "div"}, "'div' is unknown; choose .*rsqrt"),
    "weight_without_form": ({"weight_form": "none"}, "'none' came with a weight"),
    "form_without_weight": ({"weight": None, "weight_form": "1+w"}, "came with no weight"),
    "two_scales": ({"scale": 2.0, "scale_tensor": torch.tensor(2.0)}, "give one of them"),
    "x_without_dimensions": ({"x": torch.tensor(1.0)}, "x is 0-d"),
    "x_fp64": ({"x": torch.ones(3, 16, dtype=torch.float64)}, "x is torch.float64; .*Cast"),
    "x_int": ({"x": torch.ones(3, 16, dtype=torch.int32)}, "x is torch.int32"),
    "out_dtype_fp64": ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
    "residual_fp64": (
        {"residual": torch.ones(3, 16, dtype=torch.float64)},
        "residual is torch",
    ),
    "residual_broadcasts": ({"residual": shared(1, 16)}, r"\(1, 16\).*must be \(3, 16\)"),
    "residual_of_another_rank": ({"residual": shared(1, 3, 16)}, r"must be \(3, 16\)"),
    "residual_reshaped": ({"residual": shared(16, 3)}, r"must be \(3, 16\)"),
    "weight_of_another_size": ({"weight": shared(8)}, r"weight has shape \(8,\).*\(16,\)"),
    "weight_of_one": ({"weight": shared(1)}, r"weight has shape \(1,\)"),
    "bias_2d": ({"bias": shared(3, 16)}, r"bias has shape \(3, 16\)"),
    "eps_tensor_1d": ({"eps_tensor": torch.ones(1)}, "eps_tensor has shape .*0-d"),
    "scale_tensor_1d": ({"scale_tensor": torch.ones(16)}, "scale_tensor has shape .*0-d"),
    "other_device": ({"residual": torch.empty(3, 16, device="meta")}, "meta and x on cpu"),
}


@pytest.mark.parametrize("implementation", ["real", "fake"])
@pytest.mark.parametrize("name", NONSENSE)
def test_arguments_that_make_no_sense_raise(name: str, implementation: str) -> None:
    changed, message = NONSENSE[name]
    given = arguments(**changed)
    run = ops._run if implementation == "real" else ops._fake
    with pytest.raises(ValueError, match=message):
        run(*given)


def test_the_dispatcher_raises_the_same_errors() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        call(arguments(weight_form="half"))
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=r"must be \(3, 16\)"):
        call(
            arguments(
                x=mode.from_tensor(shared(3, 16)),
                residual=mode.from_tensor(shared(1, 16)),
                weight=None,
            )
        )


@pytest.mark.parametrize("name", ["x", "residual", "weight", "bias", "eps_tensor"])
def test_an_input_that_requires_grad_raises_and_is_named(name: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {"x": (3, 16), "residual": (3, 16), "eps_tensor": ()}
    tensor = torch.ones(shapes.get(name, (16,)), requires_grad=True)
    given = arguments(**{name: tensor})
    with pytest.raises(GradientError, match=f"require one: {name}\\..*no_grad"):
        call(given)
    with torch.no_grad():
        results = call(given)
    assert not any(result.requires_grad for result in results)


def test_inference_mode_needs_no_gradient() -> None:
    with torch.inference_mode():
        assert call(arguments()).norm.shape == (3, 16)


def test_a_compiled_call_that_would_lose_a_gradient_raises() -> None:
    torch._dynamo.reset()

    def step(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return ops.all_reduce_add_rms_norm(x, None, weight, None, 1e-6, "0", 2)[0]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    weight = torch.ones(16, dtype=BF16, requires_grad=True)
    with pytest.raises(Exception, match=r"has no gradient formula.*require one: weight"):
        compiled(shared(3, 16), weight)


def test_a_group_of_another_size_raises_with_both_sizes_and_the_remedy() -> None:
    given = arguments(world_size=4)
    with pytest.raises(
        WorldSizeError, match=r"of 4 ranks.*now has 2; call torch._dynamo.reset"
    ):
        call(given)


def test_an_unknown_group_raises() -> None:
    with pytest.raises(GroupError, match="no process group 'tensor_parallel'"):
        call(arguments(group_name="tensor_parallel"))


def test_a_destroyed_group_raises_and_a_new_one_of_its_name_is_checked_anew() -> None:
    given = arguments(x=torch.ones(3, 16, dtype=FP32))
    assert call(given).norm.shape == (3, 16)
    dist.destroy_process_group()
    with pytest.raises(GroupError, match="no process group '0'"):
        call(given)
    with fake_group(3), pytest.raises(WorldSizeError, match=r"of 2 ranks.*now has 3"):
        call(given)

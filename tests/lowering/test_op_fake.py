"""The fake implementation under symbolic shapes: right results, no guard on tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_support import ALL, BF16, FP32, shared
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fx_fusion.ops import all_reduce_add_rms_norm
from fx_fusion.testing import fake_group


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_group(2):
        yield


def fused(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> Any:
    return all_reduce_add_rms_norm(x, residual, weight, None, 1e-6, "0", 2, **ALL)


def test_an_unbacked_number_of_tokens_makes_no_guard_and_no_assertion() -> None:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        tokens = shape_env.create_unbacked_symint()
        x = torch.empty(tokens, 16, dtype=BF16)
        residual = torch.empty(tokens, 16, dtype=FP32)
        before = str(shape_env.deferred_runtime_asserts)
        norm, hidden, reduced, rstd = fused(x, residual, torch.empty(16))
    assert [r.dtype for r in (norm, hidden, reduced, rstd)] == [FP32, FP32, BF16, FP32]
    for result, last in ((norm, 16), (hidden, 16), (reduced, 16), (rstd, 1)):
        assert str(result.shape[0]) == str(tokens)
        assert result.shape[1] == last
        assert result.stride() == (last, 1)
    assert shape_env.guards == []
    assert str(shape_env.deferred_runtime_asserts) == before


def test_two_unbacked_sizes_become_equal_by_an_assertion_at_run_time() -> None:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        tokens, others = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
        x, residual = torch.empty(tokens, 16), torch.empty(others, 16)
        fused(x, residual, torch.empty(16))
    assert shape_env.guards == []
    assert str(tokens) in str(shape_env.deferred_runtime_asserts)


@pytest.mark.parametrize("shape", [("s", 16), (2, "s", 16), ("s", 3, "s", 16)])
def test_a_dynamic_number_of_tokens_compiles_once(shape: tuple[int | str, ...]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused, backend=counter, fullgraph=True)
    for tokens in (2, 3, 17, 5):
        sizes = [tokens if size == "s" else int(size) for size in shape]
        x, residual = shared(*sizes), shared(*sizes, seed=1)
        for dimension, size in enumerate(shape):
            if size == "s":
                torch._dynamo.mark_dynamic(x, dimension)
                torch._dynamo.mark_dynamic(residual, dimension)
        given = compiled(x, residual, shared(16, seed=2))
        expected = fused(x, residual, shared(16, seed=2))
        for a, b in zip(given, expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    assert counter.frame_count == 1


def test_an_unbacked_number_of_tokens_compiles_once_for_0_and_1_as_well() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused, backend=counter, fullgraph=True)
    for tokens in (4, 1, 0, 9):
        x = shared(tokens, 16)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        given = compiled(x, None, shared(16, seed=2))
        for a, b in zip(given, fused(x, None, shared(16, seed=2)), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_the_meta_device_gives_metadata_and_needs_no_group() -> None:
    x = torch.empty(5, 16, dtype=BF16, device="meta")
    results = all_reduce_add_rms_norm(
        x, None, None, None, 1e-6, "no such group", 8, weight_form="none", want_residual=True
    )
    assert [(r.device.type, tuple(r.shape), r.dtype) for r in results] == [
        ("meta", (5, 16), BF16),
        ("meta", (5, 16), BF16),
        ("meta", (0,), BF16),
        ("meta", (0,), FP32),
    ]

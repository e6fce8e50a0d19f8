"""explain leaves no trace: tensors, modules, caches and what torch.compile keeps stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import fx_fusion
from fx_fusion.testing import fake_group

HIDDEN = 16


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_group(2):
        yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """One site; keeps what it saw in an attribute and counts in a buffer."""

    steps: torch.Tensor

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.projection = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)
        self.register_buffer("steps", torch.zeros(()))
        self.seen: torch.Tensor | None = None
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.breaks:
            torch._dynamo.graph_break()
        y = self.projection(x)
        dist.all_reduce(y)
        self.seen = y
        normed: torch.Tensor = self.norm(x + y)
        return normed


def tokens(count: int = 4) -> torch.Tensor:
    return torch.ones(count, HIDDEN)


def explained(fn: Any, *args: Any) -> None:
    """Explain for inference, and make sure that there was something to see."""
    with torch.no_grad():
        assert fx_fusion.explain(fn)(*args).fused_count == 1


@torch.no_grad()
@pytest.mark.parametrize("breaks", [False, True])
def test_a_function_compiled_before_is_not_compiled_again(breaks: bool) -> None:
    # torch 2.14 compiles again after the process's first use of Inductor, whoever uses it.
    explained(Layer(), tokens())
    model, counter = Layer(breaks), CompileCounter()
    compiled = torch.compile(model, backend=counter)
    first = compiled(tokens())
    frames = counter.frame_count
    # More often than Dynamo would compile the same function.
    with torch._dynamo.config.patch(recompile_limit=2):
        for count in range(2, 6):
            explained(model, tokens(count))
        torch.testing.assert_close(compiled(tokens()), first)
        assert counter.frame_count == frames
        compiled(tokens(7))
        assert counter.frame_count == frames + 1


@torch.no_grad()
@pytest.mark.parametrize("breaks", [False, True])
def test_sizes_seen_by_explain_do_not_make_a_later_compilation_dynamic(breaks: bool) -> None:
    model, counter = Layer(breaks), CompileCounter()
    explained(model, tokens(2))
    explained(model, tokens(3))
    compiled = torch.compile(model, backend=counter)
    compiled(tokens(4))
    frames = counter.frame_count
    # A graph with dynamic sizes would take these as well.
    compiled(tokens(5))
    assert counter.frame_count == frames + 1


def test_dynamo_s_counts_stay_as_they_were() -> None:
    torch.compile(Layer(), backend="eager")(tokens())
    before = copy.deepcopy(counters)
    explained(Layer(breaks=True), tokens())
    assert counters == before


def test_it_is_none_of_the_reports_of_what_was_compiled() -> None:
    fx_fusion.clear_reports()
    explained(Layer(), tokens())
    assert fx_fusion.reports() == []


def test_no_cache_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    explained(Layer(), tokens())
    assert list(tmp_path.rglob("*")) == []


def test_modules_keep_their_attributes_buffers_and_gradients() -> None:
    model = Layer()
    model(tokens()).sum().backward()
    seen, weight = model.seen, model.projection.weight
    gradient = weight.grad
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def step(x: torch.Tensor) -> None:
        setattr(model, "added", 3)  # noqa: B010
        model(x).sum().backward()

    assert fx_fusion.explain(step)(tokens()).fused_count == 1
    assert model.seen is seen
    assert not hasattr(model, "added")
    assert model.projection.weight is weight
    assert weight.grad is gradient
    assert type(gradient) is torch.Tensor
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name


def test_arguments_keep_their_values() -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        x.mul_(2)
        normed: torch.Tensor = nn.functional.rms_norm(x + 1, (HIDDEN,), weight)
        weight.zero_()
        return normed

    x, weight = tokens(), torch.ones(HIDDEN)
    fx_fusion.explain(fn)(x, weight)
    assert torch.equal(x, tokens())
    assert torch.equal(weight, torch.ones(HIDDEN))


@dataclass
class Cache:
    """What a model may be given to write its keys into."""

    keys: torch.Tensor
    calls: int = 0


def test_an_object_that_holds_tensors_is_not_written_to() -> None:
    model, cache = Layer(), Cache(torch.zeros(4, HIDDEN))
    keys = cache.keys

    def fn(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.keys.add_(x)
        cache.keys = torch.cat([cache.keys, x])
        cache.calls += 1
        normed: torch.Tensor = model(x)
        return normed

    explained(fn, tokens(), cache)
    assert cache.keys is keys
    assert cache.calls == 0
    assert not keys.any()


def test_no_op_is_run() -> None:
    make: Any = torch.library.Library
    library = make("fx_fusion_test", "FRAGMENT")
    library.define("must_not_run(Tensor x) -> Tensor")

    def real(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an op was run")

    library.impl("must_not_run", real, "CPU")
    torch.library.register_fake(
        "fx_fusion_test::must_not_run", lambda x: torch.empty_like(x), lib=library
    )
    model = Layer(breaks=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.fx_fusion_test.must_not_run(x)
        torch._dynamo.graph_break()
        normed: torch.Tensor = model(torch.ops.fx_fusion_test.must_not_run(x))
        return normed

    explained(fn, tokens())


def test_parts_compiled_in_place_stay_compiled() -> None:
    part = Layer()
    part.compile(backend="eager")
    compiled = part._compiled_call_impl
    explained(nn.Sequential(part), tokens())
    assert part._compiled_call_impl is compiled


def test_an_error_of_the_user_s_leaves_no_trace_either() -> None:
    model = Layer()

    def wrong(x: torch.Tensor) -> None:
        model(x)
        torch._dynamo.graph_break()
        raise ValueError("the user's")

    before = copy.deepcopy(counters)
    with pytest.raises(ValueError, match="the user's"):
        fx_fusion.explain(wrong)(tokens())
    assert model.seen is None
    assert counters == before
    assert torch._guards.detect_fake_mode() is None

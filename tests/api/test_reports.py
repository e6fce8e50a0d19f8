from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_support import HIDDEN, Block, fused_graphs, inputs, layer, reduced
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import fx_fusion
from fx_fusion import compiled
from fx_fusion.report import FusionReport, GraphReport, SiteReport
from fx_fusion.testing import fake_group

pytest_plugins = ["compile_fixtures"]
pytestmark = pytest.mark.usefixtures("compiling")

#: Which of torch's two caches are on: AOTAutograd's, FX graph's. The former needs the latter.
CACHES = {"both": (True, True), "fxgraph": (False, True), "none": (False, False)}


def run(fn: Callable[..., Any] = layer, training: bool = False, **how: Any) -> None:
    """Compile `fn` anew (a cache may answer) and call it."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        outputs = torch.compile(fn, **(how or {"backend": "fx_fusion"}))(*inputs(training))
        if training:
            sum(output.sum() for output in outputs).backward()


def bare(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    """One site without a norm."""
    return reduced(x) + residual, weight * 2


def shown() -> list[tuple[str, int, int]]:
    return [(r.graphs[0].kind, r.fused_count, r.site_count) for r in fx_fusion.reports()]


FUSED = ("inference", 1, 1)
BARE = ("inference", 0, 1)
STEP = [("forward", 1, 1), ("backward", 0, 0)]


@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_what_is_compiled_twice_is_reported_twice(caches: str, training: bool) -> None:
    aot, inductor = CACHES[caches]
    once = STEP if training else [FUSED]
    with (
        fake_group(4),
        functorch_config.patch(enable_autograd_cache=aot),
        inductor_config.patch(fx_graph_cache=inductor),
        fused_graphs() as graphs,
    ):
        run(training=training)
        first = fx_fusion.reports()
        assert shown() == once
        run(training=training)
        assert shown() == once * 2
    # A report from the cache is equal in everything, though the pass didn't run.
    assert fx_fusion.reports()[len(once) :] == first
    assert len(graphs) == len(once) * (1 if inductor else 2)


def test_they_are_in_the_order_of_compiling_whatever_the_cache_did() -> None:
    with fake_group(4):
        for fn in (layer, bare, bare, layer, bare, layer, layer):
            run(fn)
    order = [FUSED, BARE, BARE, FUSED, BARE, FUSED, FUSED]
    assert shown() == order


def test_asking_does_not_change_them() -> None:
    with fake_group(4):
        run()
        assert shown() == shown() == [FUSED]
    fx_fusion.reports().clear()
    assert shown() == [FUSED]


def test_clearing_forgets_cache_hits_that_nobody_has_asked_for_yet() -> None:
    with fake_group(4):
        run()
        run()
        fx_fusion.clear_reports()
        assert shown() == []
        run()
    assert shown() == [FUSED]


@pytest.mark.parametrize("clear", [counters.clear, lambda: counters["inductor"].clear()])
def test_clearing_torch_s_counters_neither_loses_nor_doubles(clear: Callable[[], None]) -> None:
    with fake_group(4):
        clear()
        run()
        clear()  # after the pass ran
        run()  # a cache hit
        assert shown() == [FUSED, FUSED]
        clear()
        assert shown() == [FUSED, FUSED]
        run()
        run()
        clear()  # the very last hit is lost with the counters, since nothing ran after it
        run()
    assert shown() == [FUSED] * 4


def test_two_graphs_with_equal_reports_stay_apart() -> None:
    def other(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        norm, hidden = layer(x, residual, weight)
        return norm + 1, hidden

    with fake_group(4):
        for fn in (layer, other, layer, other):
            run(fn)
    assert shown() == [FUSED] * 4


def test_through_inductor_s_options_they_are_the_same() -> None:
    with fake_group(4):
        for _ in range(2):
            run(options=fx_fusion.inductor_options())
    assert shown() == [FUSED, FUSED]


def test_a_graph_of_more_sites_and_breaks_gives_one_report_each() -> None:
    first, second = Block(), Block()

    def broken(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        x = first(x, residual)
        torch._dynamo.graph_break()
        return (second(second(x, residual), weight.expand(4, HIDDEN)),)

    with fake_group(4):
        run(broken)
    assert shown() == [FUSED, ("inference", 2, 2)]


def test_a_report_that_cannot_be_read_is_left_out() -> None:
    known = compiled.PREFIX + "id:"
    for text in ("{", "[]", json.dumps({"kind": "inference"}), '{"sites": [{"new": 1}]}'):
        counters["inductor"][known + text] += 1
    assert fx_fusion.reports() == []


def test_recording_and_reading_back_keep_every_field() -> None:
    site = SiteReport(
        fused=False,
        reason=fx_fusion.Reason.NO_NORM,
        numbers={"a": 1, "b": 2.5, "c": "d", "e": True},
        source="model.py:1 in f",
        module="layers.0",
        shape=("s0", 8),
        dtype="bfloat16",
        group="0",
        world_size=4,
        norm="w * h",
        steps=("view", "bias"),
        outputs=("norm",),
        kernel="unfused",
    )
    report = GraphReport("forward", (site,), ("A note.",))
    compiled.record(report)
    (key,) = [key for key in counters["inductor"] if key.startswith(compiled.PREFIX)]
    counters["inductor"][key] += 1  # as a cache hit does
    assert fx_fusion.reports() == [FusionReport((report,))] * 2

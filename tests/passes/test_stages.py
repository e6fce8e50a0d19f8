"""The stages of the pass alone: finding reads, judging decides from what it is given, rewriting
takes one site at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fusion.passes.find_norms import find_norms
from fx_fusion.passes.find_sites import Site, find_sites
from fx_fusion.passes.judge import Decision, Facts, judge
from fx_fusion.passes.order import mutations_of
from fx_fusion.passes.rewrite import Rewriter
from fx_fusion.report import Reason
from fx_fusion.settings import FusionSettings
from fx_fusion.testing import fake_group

HIDDEN = 64
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_group(2):
        yield


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, funcol).all_reduce(x, "sum", dist.group.WORLD))


def rms_norm(h: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    wide = h.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed.to(h.dtype) if weight is None else weight * normed.to(h.dtype)


def gemma_norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (rms_norm(h.float()) * (1.0 + weight.float())).to(h.dtype)


def one_site(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
    h = r + all_reduce(x)
    return rms_norm(h, w), h


def two_sites(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
    h = r + all_reduce(x)
    g = h + all_reduce(torch.tanh(rms_norm(h, w)))
    return gemma_norm(g, w), g


def no_norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.tanh(all_reduce(x) + r), w


def graph_of(layer: Layer) -> fx.Graph:
    x, r = (torch.empty(4, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    w = torch.empty(HIDDEN, dtype=torch.bfloat16)
    return make_fx(layer, tracing_mode="fake")(x, r, w).graph


def sites_of(graph: fx.Graph) -> list[Site]:
    return find_sites(graph, find_norms(graph))


def facts_of(graph: fx.Graph, **changes: Any) -> Facts:
    facts = Facts(lambda name: 2, lambda device: "cpu", mutations_of(graph))
    return replace(facts, **changes)


def fused_calls(graph: fx.Graph) -> int:
    op = torch.ops.fx_fusion.all_reduce_add_rms_norm.default
    return sum(node.target == op for node in graph.nodes)


@pytest.mark.parametrize(
    ("normed", "weight", "rounded_first"),
    [
        (lambda h, w: rms_norm(h), "none", False),
        (lambda h, w: rms_norm(h, w), "w", True),
        (gemma_norm, "1+w", False),
        (lambda h, w: (w * rms_norm(h.float())).to(h.dtype), "w", False),
    ],
)
def test_a_norm_is_found_as_data(
    normed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    weight: str,
    rounded_first: bool,
) -> None:
    graph = graph_of(lambda x, r, w: normed(x, w))
    (norm,) = find_norms(graph)
    assert norm.form.weight == weight
    assert (norm.norm_dtype is torch.bfloat16) == rounded_first
    assert (norm.hidden.name, norm.dims) == ("x_1", (-1,))
    assert norm.eps == pytest.approx(1e-6)
    assert list(norm.interior) == sorted(norm.interior)
    assert norm.output is norm.interior[-1]


@pytest.mark.parametrize("layer", [one_site, two_sites, no_norm])
def test_finding_reads_and_finds_the_same_again(layer: Layer) -> None:
    graph = graph_of(layer)
    before = str(graph)
    first, second = sites_of(graph), sites_of(graph)
    assert str(graph) == before
    assert first == second
    assert [site.all_reduce for site in first] == sorted(site.all_reduce for site in first)


def test_each_all_reduce_is_a_site_and_each_norm_belongs_to_one() -> None:
    first, second = sites_of(graph_of(two_sites))
    assert [step.kind for step in first.steps] == [step.kind for step in second.steps]
    assert [step.kind for step in first.steps] == ["residual"]
    assert first.norm is not None
    assert second.norm is not None
    assert first.norm.output is not second.norm.output
    assert (first.norm.form.weight, second.norm.form.weight) == ("w", "1+w")
    (bare,) = sites_of(graph_of(no_norm))
    assert bare.norm is None
    assert bare.stop is not None


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({}, {}, None),
        ({"disabled": True}, {}, Reason.DISABLED),
        ({"world_size": lambda name: None}, {}, Reason.GROUP_UNKNOWN),
        ({"world_size": lambda name: 1}, {}, Reason.GROUP_OF_ONE),
        ({}, {"kernel": "flashinfer"}, Reason.KERNEL_UNAVAILABLE),
    ],
)
def test_a_decision_follows_from_site_facts_and_settings_alone(
    changes: dict[str, Any], settings: dict[str, Any], reason: Reason | None
) -> None:
    graph = graph_of(one_site)
    before = str(graph)
    (site,) = sites_of(graph)
    chosen = FusionSettings(**settings)
    decision = judge(site, facts_of(graph, **changes), chosen)
    assert decision.reason is reason
    assert (decision.plan is None) == (reason is not None)
    assert decision == judge(site, facts_of(graph, **changes), chosen)
    assert str(graph) == before


def decided(graph: fx.Graph, site: Site) -> Decision:
    decision = judge(site, facts_of(graph), FusionSettings())
    assert decision.plan is not None
    return decision


def test_a_rewrite_takes_one_site_and_leaves_the_other() -> None:
    graph = graph_of(two_sites)
    first, second = sites_of(graph)
    rewriter = Rewriter(graph, FusionSettings())
    assert not rewriter.is_stale(second)
    outputs = rewriter.rewrite(first, decided(graph, first))
    graph.lint()
    assert outputs == ("norm", "residual")
    assert fused_calls(graph) == len(rewriter.fused) == 1
    assert first.all_reduce in rewriter.erased
    assert rewriter.is_stale(first)
    assert second.all_reduce in graph.nodes
    assert first.norm is not None
    assert rewriter.current(first.norm.output) in graph.nodes
    # What is left is a graph with one site, whose residual is the first one's result.
    (left,) = sites_of(graph)
    assert left.all_reduce is second.all_reduce
    residual = left.step("residual")
    assert residual is not None
    assert residual.value is rewriter.current(first.steps[-1].node)
    rewriter.rewrite(left, decided(graph, left))
    graph.eliminate_dead_code()
    graph.lint()
    assert (fused_calls(graph), sites_of(graph)) == (2, [])

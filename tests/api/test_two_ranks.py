"""Compiled code on two real ranks: the compile cache, training, unlike ranks, a new group."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compile_support import HIDDEN, QUICK, Block, fused_graphs, inputs, layer
from torch._dynamo.utils import counters
from torch._inductor import config

import fx_fusion
from fx_fusion.errors import WorldSizeError
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.testing import fake_group, spawn

pytest_plugins = ["compile_fixtures"]


def own_inputs(rank: int, tokens: int = 4) -> list[torch.Tensor]:
    """This rank's partial sum; what is replicated is the same on all ranks."""
    x, residual, weight = inputs(tokens=tokens)
    return [x * (rank + 1) + rank, residual, weight]


def differences(given: Any, expected: Any) -> list[float]:
    return [
        float((one - other).abs().max()) for one, other in zip(given, expected, strict=True)
    ]


def cached(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """Compile a layer, then a training step, in a fresh process whose cache may hold them."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    config.load_config(QUICK)
    given = own_inputs(rank)
    block, (x, residual, _) = Block(), given
    state = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, generator=state)
    with fused_graphs() as graphs:
        with torch.no_grad():
            outputs = torch.compile(layer, options=fx_fusion.inductor_options())(*given)
            expected = layer(*given)
        torch.compile(block, backend="fx_fusion")(x, residual).sum().backward()
    gradient = block.projection.weight.grad
    assert gradient is not None
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    return {
        "key": FusionPass().key(),
        "pass calls": len(graphs),
        "cache hits": (hits, counters["inductor"]["fxgraph_cache_hit"]),
        "reports": [report.to_dict() for report in fx_fusion.reports()],
        "difference": max(differences(outputs, expected)),
        "gradient": float(gradient.sum()),
    }


def test_a_warm_cache_gives_the_fused_graphs_and_reports_without_a_pass(tmp_path: Path) -> None:
    # Both ranks share the directory; the second to come may find the first one's graphs.
    cold = spawn(cached, 2, timeout=300, args=(str(tmp_path),))
    assert 3 <= sum(rank["pass calls"] for rank in cold) <= 6
    warm = spawn(cached, 2, timeout=300, args=(str(tmp_path),))
    # Other keys mean other graphs, and rightly so: say, a source was saved since then.
    assert [rank["key"] for rank in cold + warm] == [cold[0]["key"]] * 4
    assert [rank["pass calls"] for rank in warm] == [0, 0]
    assert [rank["cache hits"] for rank in warm] == [(2, 3), (2, 3)]
    for number, rank in enumerate(cold + warm):
        assert rank["difference"] < 1e-6
        assert rank["reports"] == cold[0]["reports"]
        assert rank["gradient"] == cold[number % 2]["gradient"]
    graphs = [graph for report in warm[0]["reports"] for graph in report["graphs"]]
    fused = [
        (g["kind"], [(s["world_size"], s["kernel"]) for s in g["sites"] if s["fused"]])
        for g in graphs
    ]
    kernel = fused[0][1][0][1]
    assert kernel
    assert fused == [
        ("inference", [(2, kernel)]),
        ("forward", [(2, kernel)]),
        ("backward", []),
    ]
    assert warm[0]["gradient"] != warm[1]["gradient"]  # inputs differ between the ranks


def training(rank: int) -> dict[str, Any]:
    """Loss and gradients of a step, against eager."""
    torch.manual_seed(rank)
    block = Block()
    compiled = torch.compile(copy.deepcopy(block), backend="fx_fusion")
    x, residual, _ = own_inputs(rank)
    results = []
    models: list[Any] = [block, compiled]
    for model in models:
        ours, theirs = x.clone().requires_grad_(), residual.clone().requires_grad_()
        loss = model(ours, theirs).square().mean()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([loss.detach(), ours.grad, theirs.grad, *gradients])
    kinds = [(r.graphs[0].kind, r.fused_count) for r in fx_fusion.reports()]
    return {"difference": max(differences(*results)), "kinds": kinds}


def unlike_ranks(rank: int) -> dict[str, Any]:
    """One rank is compiled for any number of tokens, the other for each."""
    block = Block()
    block.load_state_dict({name: t / 2 for name, t in block.state_dict().items()})
    compiled = torch.compile(block, backend="fx_fusion", dynamic=rank == 0)
    worst = 0.0
    with torch.no_grad():
        for tokens in (3, 8, 1, 3):
            x, residual, _ = own_inputs(rank, tokens)
            if rank == 1:  # and off alignment by an element
                x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(tokens, HIDDEN)
            worst = max(worst, *differences([compiled(x, residual)], [block(x, residual)]))
    return {"difference": worst, "fused": [r.fused_count for r in fx_fusion.reports()]}


def layer_of_name(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    """`layer` with the group as a name, which Dynamo doesn't look behind."""
    c10d = torch.ops._c10d_functional
    hidden = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")) + residual
    return F.rms_norm(hidden, (HIDDEN,), weight, 1e-6), hidden


def new_group(rank: int, directory: str) -> dict[str, Any]:
    """What becomes of compiled code when its group is replaced by one of another size."""
    given = own_inputs(rank)
    by_group = torch.compile(layer, backend="fx_fusion")
    by_name = torch.compile(layer_of_name, backend="fx_fusion")
    with torch.no_grad():
        by_group(*given)
        by_name(*given)
        dist.destroy_process_group()
        meeting = f"file://{directory}/alone{rank}"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        difference = max(differences(by_group(*given), layer(*given)))
        try:
            by_name(*given)
            message = "no error"
        except WorldSizeError as error:
            message = str(error)
    sites = [report.sites[0] for report in fx_fusion.reports()]
    found = [(site.world_size, site.fused) for site in sites]
    return {"difference": difference, "message": message, "sites": found}


def everything(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/cache"
    config.load_config(QUICK)
    done: dict[str, Any] = {"training": training(rank)}
    for name, job in (("unlike", unlike_ranks), ("group", new_group)):
        torch._dynamo.reset()
        fx_fusion.clear_reports()
        done[name] = job(rank) if job is unlike_ranks else new_group(rank, directory)
    return done


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(everything, 2, timeout=300, args=(str(tmp_path_factory.mktemp("ranks")),))


def test_a_training_step_gives_eager_s_loss_and_gradients(results: list[Any]) -> None:
    for rank in results:
        assert rank["training"]["difference"] < 1e-5
        assert rank["training"]["kinds"] == [("forward", 1), ("backward", 0)]


def test_ranks_that_compile_differently_agree(results: list[Any]) -> None:
    for rank in results:
        assert rank["unlike"]["difference"] < 1e-5
        assert set(rank["unlike"]["fused"]) == {1}
    # The dynamic rank has fewer graphs than the one that starts out static.
    assert len(results[0]["unlike"]["fused"]) <= len(results[1]["unlike"]["fused"])


def test_a_group_of_another_size_is_compiled_for_anew_or_raises(results: list[Any]) -> None:
    for rank in results:
        found = rank["group"]
        # Dynamo compiles again for another group object ...
        assert found["sites"] == [(2, True), (2, True), (1, False)]
        assert found["difference"] < 1e-5
        # ... but can't see that a name means another group.
        assert "compiled for a group of 2 ranks" in found["message"]
        assert "now has 1" in found["message"]


@pytest.mark.usefixtures("compiling")
def test_what_was_cached_for_a_group_is_not_used_for_another_of_its_name() -> None:
    compiled = torch.compile(layer, backend="fx_fusion")
    with torch.no_grad(), fused_graphs() as graphs:
        for world_size in (4, 2, 4):
            torch._dynamo.reset()
            with fake_group(world_size):
                compiled(*inputs())
    assert len(graphs) == 2  # the third one came from the cache
    sizes = [report.sites[0].world_size for report in fx_fusion.reports()]
    assert sizes == [4, 2, 4]

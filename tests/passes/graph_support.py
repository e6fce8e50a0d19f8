"""Compile user-level code up to the graph pass, look at what it did, and run the result.

`compile_and_look` goes through Dynamo, AOTAutograd and Inductor's own graph passes as torch.compile
does, with ours in its slot, then runs the graphs node by node in place of generating code: a
second or less, and each node computes what it does in eager.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table

from fx_fusion import compat
from fx_fusion.compiled import reports
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.report import GraphReport, Reason, SiteReport
from fx_fusion.settings import FusionSettings

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
#: Tokens and hidden size of the inputs, unless a test needs others.
TOKENS, HIDDEN = 8, 64
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
COALESCED = torch.ops._c10d_functional.all_reduce_coalesced.default
WAIT = torch.ops._c10d_functional.wait_tensor.default


def is_fused_call(node: fx.Node) -> bool:
    """True for a fused site; one with a residual is offered to Inductor by another name."""
    ops = torch.ops.fx_fusion
    return node.target in (
        ops.all_reduce_add_rms_norm.default,
        ops.all_reduce_add_rms_norm_with_residual.default,
        ops.all_reduce_add_rms_norm_over_residual.default,
    )


@dataclass(frozen=True)
class Seen:
    """One graph as the pass met it and as it left it.

    Attributes:
        report: What the pass said of it.
        before: The graph's text before the pass.
        after: The graph's text after it.
        graph: The graph after it.
    """

    report: GraphReport
    before: str
    after: str
    graph: fx.Graph

    def count(self, op: object) -> int:
        """How many nodes call `op` after the pass."""
        return sum(node.target is op for node in self.graph.nodes)

    def fused_calls(self) -> list[fx.Node]:
        """The calls of the fused op, in order."""
        return [node for node in self.graph.nodes if is_fused_call(node)]


@dataclass(frozen=True)
class Looked:
    """What `compile_and_look` found.

    Attributes:
        graphs: The graphs in the order they were compiled.
        outputs: What the compiled function returned.
        compiled: The compiled function, to be called again.
    """

    graphs: list[Seen]
    outputs: Any
    compiled: Callable[..., Any]

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """Every all_reduce of every graph."""
        return tuple(site for seen in self.graphs for site in seen.report.sites)

    @property
    def fused_count(self) -> int:
        return sum(site.fused for site in self.sites)

    def reasons(self) -> Counter[Reason]:
        return Counter(site.reason for site in self.sites if site.reason is not None)

    def only(self) -> Seen:
        """The graph, where there is but one."""
        (seen,) = self.graphs
        return seen


class _Watch(compat.CustomGraphPass):
    """Calls the user's pass, then ours, and checks what must hold of every graph."""

    def __init__(
        self,
        settings: FusionSettings,
        users: Callable[[fx.Graph], None] | None,
        graphs: list[Seen],
    ) -> None:
        self.fusion = FusionPass(settings)
        self.users = users
        self.graphs = graphs

    def __call__(self, graph: fx.Graph) -> None:
        if self.users is not None:
            self.users(graph)
        before, guards, waits = str(graph), _guards(graph), _waits(graph)
        known = set(graph.nodes)
        self.fusion(graph)
        report = reports()[-1].graphs[0]
        seen = Seen(report, before, str(graph), graph)
        self.graphs.append(seen)
        assert _guards(graph) == guards, "the pass made a guard"
        graph.lint()
        _check_collectives(seen, waits)
        for node in set(graph.nodes) - known:
            assert "val" in node.meta, f"the new node {node.name} holds no fake tensor"
        if not any(site.fused for site in report.sites):
            unmerged = not any("merged" in site.steps for site in report.sites)
            assert seen.after == before or not unmerged, "nothing fused, and yet it changed"

    def uuid(self) -> str:
        return "nothing is cached here, but without a uuid each report would say so"


def _check_collectives(seen: Seen, waits: int) -> None:
    """Each fused site's all_reduce is gone with its wait, and all others are still there."""
    sites = seen.report.sites
    if any("merged" in site.steps for site in sites):
        return
    fused = sum(site.fused for site in sites)
    assert len(seen.fused_calls()) == fused
    opaque = len(sites) - seen.before.count("_c10d_functional.all_reduce")
    assert seen.count(ALL_REDUCE) + seen.count(COALESCED) + fused + opaque >= len(sites)
    if not opaque:
        assert seen.count(ALL_REDUCE) + seen.count(COALESCED) == len(sites) - fused
        assert seen.count(WAIT) >= waits - fused


def _waits(graph: fx.Graph) -> int:
    return sum(node.target is WAIT for node in graph.nodes)


def _guards(graph: fx.Graph) -> tuple[int, int]:
    """How many guards and deferred asserts the graph's symbolic sizes have."""
    for node in graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                env = size.node.shape_env
                return len(env.guards), env.num_deferred_runtime_asserts
    return 0, 0


def compile_and_look(
    fn: Callable[..., Any],
    *args: Any,
    train: bool = False,
    **options: Any,
) -> Looked:
    """Compile `fn` for `args` up to the pass and run it.

    Args:
        fn: A function, or a module.
        args: Its arguments.
        train: Compute gradients too, from the sum of the first output.
        **options: As for `compiled_op_by_op`.
    """
    torch._dynamo.reset()
    graphs: list[Seen] = []
    compiled = compiled_op_by_op(fn, graphs=graphs, **options)
    with contextlib.nullcontext() if train else torch.no_grad():
        outputs = compiled(*args)
        if train:
            first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            first.float().sum().backward()
    return Looked(graphs, outputs, compiled)


def compiled_op_by_op(
    fn: Callable[..., Any],
    *,
    graphs: list[Seen] | None = None,
    dynamic: bool | None = None,
    users_pass: Callable[[fx.Graph], None] | None = None,
    fullgraph: bool = True,
    inductor: bool = True,
    **settings: Any,
) -> Callable[..., Any]:
    """`fn` compiled up to the pass; a call runs the graphs node by node.

    Args:
        fn: A function, or a module.
        graphs: The graphs are added to it as they are compiled.
        dynamic: torch.compile's.
        users_pass: Another custom pass, in front of ours.
        fullgraph: torch.compile's.
        inductor: Apply Inductor's passes as well; they need a device that exists.
        **settings: FusionSettings.
    """
    watch = _Watch(FusionSettings(**settings), users_pass, [] if graphs is None else graphs)

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if inductor:
            with inductor_config.patch(post_grad_custom_post_pass=watch):
                compat.run_post_grad_passes(gm, inputs, bool(options.get("is_inference")))
        else:
            watch(gm.graph)
            gm.recompile()

        def run(values: list[Any]) -> Any:
            with torch.no_grad():
                return gm(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        if inductor:
            return compile_fx.compile_fx(gm, inputs, inner_compile=inner)
        decompositions = select_decomp_table()
        return aot_autograd(fw_compiler=inner, decompositions=decompositions)(gm, inputs)

    compiled: Callable[..., Any] = torch.compile(
        fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph
    )
    return compiled

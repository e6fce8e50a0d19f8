"""Trace a random program, fuse its graph, run both graphs, and say what is wrong.

`check(program, ...)` does all of it in the process that calls it, under whatever group is
there: a fake one (whose all_reduce changes nothing) or a real one of two ranks.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from random_ops import names, registered_ops
from random_programs import Program
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.distributed import distributed_c10d
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fx_fusion.lowering.cpu_workspace import agree_on_unfused
from fx_fusion.lowering.select import digest_of
from fx_fusion.passes import pipeline
from fx_fusion.report import GraphReport
from fx_fusion.settings import FusionSettings
from fx_fusion.switch import disable

#: Seconds after which a collective gives up.
COLLECTIVE_TIMEOUT = 120
_collectives = torch.ops._c10d_functional
_REDUCES = {
    _collectives.all_reduce.default,
    _collectives.all_reduce_coalesced.default,
    torch.ops.random_graphs.all_reduce.default,
}


@contextlib.contextmanager
def ready(rank: int) -> Iterator[Groups]:
    """The groups and registered ops that programs need, for the length of a block."""
    with registered_ops():
        yield make_groups(rank)


@dataclass(frozen=True)
class Groups:
    """The groups that programs name: all ranks twice over, and this rank alone."""

    world: str
    pair: str
    one: str

    def all(self) -> list[Any]:
        """The groups themselves."""
        resolve = cast(Any, distributed_c10d)._resolve_process_group
        return [resolve(name) for name in (self.world, self.pair, self.one)]

    def count(self) -> int:
        """How many collectives have been started on them; 0 if they are fake."""
        if dist.get_backend() == "fake":
            return 0
        return sum(group._get_sequence_number_for_group() for group in self.all())


def make_groups(rank: int) -> Groups:
    """Make the groups that programs name; every rank must call it."""
    limit = timedelta(seconds=COLLECTIVE_TIMEOUT)
    world = dist.group.WORLD
    assert world is not None
    ranks = range(dist.get_world_size())
    pair = dist.new_group(list(ranks), timeout=limit)
    ones = [dist.new_group([only], timeout=limit) for only in ranks]
    if dist.get_backend() == "gloo":
        cast(Any, distributed_c10d)._set_pg_timeout(limit, world)
    one = cast(Any, ones[rank])
    if dist.get_backend() == "gloo":
        # the one exchange of a group's life, here, so that it is counted for no program
        unfused = digest_of(FusionSettings(kernel="unfused"))
        for group in (world, pair):
            known = cast(dist.ProcessGroup, group)
            agree_on_unfused(known.group_name, known, unfused)
    return Groups(world.group_name, cast(Any, pair).group_name, one.group_name)


@dataclass
class Outcome:
    """What became of one program.

    Attributes:
        wrong: One line for each thing that is wrong.
        report: The pass' report.
        forms: The norm form of each fused site, as text.
    """

    wrong: list[str] = field(default_factory=list)
    report: GraphReport = field(default_factory=GraphReport)
    forms: list[str] = field(default_factory=list)


def trace(program: Program, groups: Groups, inputs: list[torch.Tensor]) -> fx.GraphModule:
    """The program's aten graph, with fake tensors in `meta["val"]`."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    # Equal sizes share a symbol, as in Dynamo, unless the user has marked them as dynamic.
    named = DimDynamic.DYNAMIC if program.mode == "marked" else DimDynamic.DUCK
    stand_ins = []
    for given, tensor in zip(program.inputs, inputs, strict=True):
        dims = [named if isinstance(dim, str) else DimDynamic.STATIC for dim in given.dims]
        context = cast(Any, StatelessSymbolicContext)(dynamic_sizes=dims)
        stand_ins.append(fake.from_tensor(tensor, symbolic_context=context))
    function = program.function(names(groups.world, groups.pair, groups.one))
    if program.functional:
        function = dispatch_functionalize(function)
    table = select_decomp_table() if program.decomposed else {}
    module = make_fx(function, decomposition_table=table, tracing_mode="symbolic")(*stand_ins)
    module.graph.eliminate_dead_code()
    _edit(program, module.graph)
    module.recompile()
    return module


def _edit(program: Program, graph: fx.Graph) -> None:
    """What tracing can't give: missing fake tensors, incoming gradients."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for number, (given, node) in enumerate(zip(program.inputs, placeholders, strict=True)):
        if given.role == "tangent":
            node.target = f"tangents_{number}"
    reduces = [node for node in graph.nodes if node.target in _REDUCES]
    for site, node in zip(program.sites, reduces, strict=True):
        if site.blind:
            del node.args[0].meta["val"]


class _Checked(fx.Interpreter):
    """Runs a graph; notes where a result isn't what its fake tensor promises."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.wrong: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        promised = n.meta.get("val")
        if isinstance(result, torch.Tensor) and isinstance(promised, torch.Tensor):
            sizes = zip(promised.shape, result.shape, strict=False)
            fits = promised.dim() == result.dim() and promised.dtype is result.dtype
            if not fits or any(isinstance(p, int) and p != r for p, r in sizes):
                self.wrong.append(
                    f"{n.format_node()}: fake {promised.dtype}{list(promised.shape)}, real"
                    f" {result.dtype}{list(result.shape)}"
                )
        return result


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that torch leaves uninitialised with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def difference(given: Any, expected: Any, *, signs: bool = True) -> str:
    """What differs between two results bit by bit, NaN payloads excepted; "" if nothing."""
    if not isinstance(expected, torch.Tensor) or not isinstance(given, torch.Tensor):
        return "" if given == expected else f"{given} for {expected}"
    if given.shape != expected.shape or given.dtype != expected.dtype:
        return f"{given.dtype}{list(given.shape)} for {expected.dtype}{list(expected.shape)}"
    same = (given == expected) | (given.isnan() & expected.isnan())
    if signs and given.dtype.is_floating_point:
        same &= given.isnan() | (given.signbit() == expected.signbit())
    if bool(same.all()):
        return ""
    gap = (given.double() - expected.double()).abs()[~same].nan_to_num(torch.inf)
    count = int((~same).sum())
    return f"{count} of {given.numel()} elements differ, by up to {float(gap.max()):.3g}"


def check(program: Program, seed: int, rank: int, groups: Groups) -> Outcome:
    """Trace, fuse, run and compare one program; exceptions count as wrong too."""
    outcome = Outcome()
    try:
        before = trace(program, groups, program.tensors(seed, rank))
    except Exception:
        outcome.wrong.append(f"the program itself fails:\n{traceback.format_exc()}")
        return outcome
    try:
        after = copy.deepcopy(before)
        # The unfused path gives eager's bits and starts eager's collectives, so that what is
        # compared here is the rewriting alone.
        settings = FusionSettings.from_dict({"kernel": "unfused", **program.settings})
        guards = _guards(after.graph)
        with disable(program.disabled):
            outcome.report = pipeline.fuse_graph(after.graph, settings)
        if _guards(after.graph) != guards:
            outcome.wrong.append(f"guards were added: {guards} -> {_guards(after.graph)}")
        after.graph.lint()
        after.recompile()
        outcome.wrong += _report_faults(program, outcome.report, before.graph, after.graph)
        outcome.forms = _forms(after.graph)
        more = (0, 3) if program.mode in ("dynamic", "marked") else (0,)
        for more_tokens in more:
            inputs = program.tensors(seed, rank, more_tokens)
            outcome.wrong += _run_faults(program, outcome.report, before, after, inputs, groups)
    except Exception:
        outcome.wrong.append(f"the pass or its graph fails:\n{traceback.format_exc()}")
    return outcome


def _guards(graph: fx.Graph) -> list[str]:
    """What the graph's symbolic sizes are assumed to be."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, FakeTensor):
            env = value.fake_mode.shape_env
            assert env is not None
            unbacked = [
                str(a) for every in env.deferred_runtime_asserts.values() for a in every
            ]
            return [*(str(guard.expr) for guard in env.guards), *unbacked]
    return []


def merged_count(report: GraphReport) -> int:
    """How many all_reduces were merged into others."""
    return sum("merged" in site.steps for site in report.sites)


def _report_faults(
    program: Program, report: GraphReport, before: fx.Graph, after: fx.Graph
) -> Iterator[str]:
    """What the report says against what the graphs hold and what the program expects."""
    outcomes = [s.reason.value if s.reason is not None else "fused" for s in report.sites]
    if len(outcomes) != len(program.sites):
        yield f"{len(program.sites)} all_reduces, {len(outcomes)} of them reported"
        return
    merging = bool(program.settings.get("merge_all_reduces"))
    for number, (outcome, site) in enumerate(zip(outcomes, program.sites, strict=True)):
        if outcome not in site.allowed and not merging:
            numbers = dict(report.sites[number].numbers)
            yield f"site {number}: {outcome} {numbers} for {' | '.join(sorted(site.allowed))}"
    left = sum(node.target in _REDUCES for node in after.nodes)
    unfused = sum(outcome != "fused" for outcome in outcomes)
    lost = sum("merged" in site.steps and not site.fused for site in report.sites)
    if left != unfused - lost:
        yield f"{left} all_reduces left, {unfused - lost} expected"
    if "fused" not in outcomes and not merged_count(report) and str(before) != str(after):
        yield f"nothing fused, but the graph is another one:\n{after}"


def _run_faults(
    program: Program,
    report: GraphReport,
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: list[torch.Tensor],
    groups: Groups,
) -> Iterator[str]:
    """Both graphs run on fresh copies of the inputs, and compared."""
    results, counts, left = [], [], []
    for module in (before, after):
        own = [tensor.clone() for tensor in inputs]
        started = groups.count()
        interpreter = _Checked(module)
        with poisoned(), torch.no_grad():
            results.append(interpreter.run(*own))
        counts.append(groups.count() - started)
        left.append(own)
        if module is after:
            yield from interpreter.wrong
    counted = dist.get_backend() != "fake"
    if counted and counts[1] != counts[0] - merged_count(report):
        yield f"{counts[1]} collectives ran, {counts[0]} before the pass"
    exact_zero = not program.settings.get("deterministic")
    if not exact_zero and not counted:
        return  # gathers nothing
    for name, given, expected in zip(program.outputs, results[1], results[0], strict=True):
        found = difference(given, expected, signs=exact_zero)
        if found:
            yield f"{name}: {found}"
    for given, mine, other in zip(program.inputs, left[1], left[0], strict=True):
        found = difference(mine, other)
        if found:
            yield f"input {given.name} is left as another: {found}"


def _forms(graph: fx.Graph) -> list[str]:
    """The norm form of each fused call: weight, cast, reciprocal."""
    op = torch.ops.fx_fusion.all_reduce_add_rms_norm.default
    forms = []
    for node in graph.nodes:
        if node.target is op:
            weight = node.kwargs.get("weight_form", "w")
            cast = "before" if node.kwargs.get("norm_dtype") is not None else "after"
            forms.append(f"{weight} {cast} {node.kwargs.get('reciprocal', 'rsqrt')}")
    return forms

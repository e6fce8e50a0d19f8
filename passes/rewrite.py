"""Replace one judged site by the fused op: the only code that changes a graph.

Before:

    r = all_reduce(x, "sum", g);  y = wait_tensor(r);  h = add(residual, y)
    h32 = convert(h, fp32);  s = rsqrt(add(mean(pow(h32, 2), [-1], True), eps))
    n = mul(weight, convert(mul(h32, s), bf16))

After:

    f = fx_fusion.all_reduce_add_rms_norm(x, residual, weight, None, eps, g, world_size, ...)
    n = f[0];  h = f[1]      # f[2] is y and f[3] is s, each only where something reads it

`wait_tensor` counts as a side effect, so dead-code elimination would keep the collective: the
matched chain is erased by hand. Inner values with readers of their own (saved for backward)
stay in the graph and are recomputed from the op's results.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

import fx_fusion.lowering.ops  # noqa: F401  (registers the op)
from fx_fusion.passes import nodes
from fx_fusion.passes.find_sites import Site
from fx_fusion.passes.judge import Decision
from fx_fusion.passes.nodes import aten, prims
from fx_fusion.passes.outputs import (
    OUTPUTS,
    chain_nodes,
    fake_results,
    output_nodes,
    wanted_outputs,
)
from fx_fusion.settings import FusionSettings

#: What a new node inherits: where it comes from, and which part of training it belongs to.
_KEPT_META: Final = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "seq_nr",
    "partitioner_tag",
    "autograd_backward",
    "custom",
)


@dataclass
class Rewriter:
    """Rewrites sites of one graph in program order.

    Attributes:
        graph: The graph being changed.
        settings: The options.
        replaced: For each node that was replaced, what stands for it now.
        erased: The nodes that are gone.
        fused: The calls of the fused op so far, in the order they were made.
    """

    graph: fx.Graph
    settings: FusionSettings
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    erased: set[fx.Node] = field(default_factory=set)
    fused: list[fx.Node] = field(default_factory=list)
    _moved: dict[tuple[fx.Node, torch.device], fx.Node] = field(default_factory=dict)
    _empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = field(default_factory=dict)

    def current(self, node: fx.Node) -> fx.Node:
        """What stands for a node now."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def is_stale(self, site: Site) -> bool:
        """True if an earlier rewrite took a part of this site's chain."""
        return any(node in self.erased or node in self.replaced for node in chain_nodes(site))

    def rewrite(self, site: Site, decision: Decision) -> tuple[str, ...]:
        """Put the fused op in the place of a site; the names of the outputs it returns."""
        roots = output_nodes(site)
        chain = chain_nodes(site)
        wanted = wanted_outputs(chain, roots)
        x = self._viewed_input(site)
        last = max([x, _known(site.reduced), *self._inputs(site)])
        with self.graph.inserting_after(last):
            fused = self._call(site, decision, x, wanted)
        self.fused.append(fused)
        results = self._results(fused, wanted)
        for node, name in roots.items():
            if name in results:
                self._replace(site, node, name, results[name])
        self._erase(site, chain)
        stands_for = [self.replaced[node] for node in roots if node in self.replaced]
        self._repair_order([fused, *results.values(), *stands_for])
        return tuple(name for name in OUTPUTS if name in wanted)

    def _inputs(self, site: Site) -> Iterable[fx.Node]:
        norm = site.norm
        assert norm is not None
        given = [step.value for step in site.steps]
        given += [norm.residual, norm.weight, norm.eps_node]
        return (self.current(node) for node in given if node is not None)

    def _viewed_input(self, site: Site) -> fx.Node:
        """x with the chain's views applied: they commute with the sum over ranks."""
        x = site.all_reduce.args[0] if site.reduced is not site.all_reduce else site.x
        assert isinstance(x, fx.Node)
        for step in site.steps:
            if nodes.is_op(step.node, nodes.VIEWS):
                x = self._same_view(step.node, x, after=_known(site.reduced))
        return x

    def _same_view(self, view: fx.Node, source: fx.Node, *, after: fx.Node) -> fx.Node:
        """A copy of `view` that reads `source`, as soon as all it reads is there."""
        shape, like = nodes.tensor(view), nodes.tensor(source)
        assert shape is not None
        assert like is not None
        last = max([source, after, *view.all_input_nodes[1:]])
        with self.graph.inserting_after(last):
            copy = nodes.copy_with_input(self.graph, view, source)
            if copy.target is aten.view.default:
                copy.target = aten.reshape.default  # x needn't have the reduced value's strides
        _set_meta(copy, view, shape.to(like.dtype))
        return copy

    def _call(
        self, site: Site, decision: Decision, x: fx.Node, wanted: frozenset[str]
    ) -> fx.Node:
        norm, plan = site.norm, decision.plan
        assert norm is not None
        assert plan is not None
        values = {kind: self._value(site, kind) for kind in ("bias", "scale", "residual")}
        residual = values["residual"]
        if residual is None and norm.residual is not None:
            residual = self.current(norm.residual)
        weight = None if norm.weight is None else self.current(norm.weight)
        eps, scale = norm.eps_node, values["scale"]
        group, world_size = site.group, decision.world_size
        args: tuple[Any, ...] = (x, residual, weight, values["bias"], norm.eps)
        args += (group, world_size)
        kwargs: dict[str, Any] = {
            "eps_tensor": None if eps is None else self._on_device(self.current(eps), x),
            "scale": self._factor(site),
            "scale_tensor": None if scale is None else self._scale(site, scale, x),
            "norm_dtype": norm.norm_dtype,
            "weight_form": norm.form.weight,
            "reciprocal": norm.form.reciprocal,
            "plan": plan.digest,
            **_dtypes(site),
            **{f"want_{name}": name in wanted for name in OUTPUTS},
            "deterministic": self.settings.deterministic,
        }
        op = torch.ops.fx_fusion.all_reduce_add_rms_norm.default
        kwargs = _without_defaults(op, kwargs)
        fused = self.graph.call_function(op, args, kwargs)
        latest = max(fused.all_input_nodes)
        if fused < latest:  # a scalar that was cast or moved for this call
            latest.append(fused)
        value = fake_results(site, x, wanted, self._empty)
        _set_meta(fused, norm.output, value)
        return fused

    def _value(self, site: Site, kind: Any) -> fx.Node | None:
        step = site.step(kind)
        return None if step is None or step.value is None else step.value

    def _factor(self, site: Site) -> float:
        step = site.step("scale")
        return 1.0 if step is None or step.factor is None else step.factor

    def _scale(self, site: Site, scale: fx.Node, x: fx.Node) -> fx.Node:
        """A 0-d scale as eager reads it.

        ATen's CPU kernel multiplies `y * s` by s in fp32, but in `s * y` it rounds s to y's
        dtype first. A float64 s is a Python float that dynamic=True made an input: it stands
        on the right in eager wherever it was written.
        """
        step, held, like = site.step("scale"), nodes.tensor(scale), nodes.tensor(x)
        assert step is not None
        assert held is not None
        assert like is not None
        value = nodes.tensor(nodes.under_scalar_cast(scale))
        is_float = value is not None and value.dtype is torch.float64
        y = nodes.tensor(step.node)
        rounds = step.operand == 0 and like.device.type == "cpu" and not is_float
        if not rounds or y is None or held.dtype == y.dtype:
            return self._on_device(scale, x)
        with self.graph.inserting_after(scale):
            rounded = self.graph.call_function(
                prims.convert_element_type.default, (scale, y.dtype)
            )
        _set_meta(rounded, scale, held.to(y.dtype))
        return rounded

    def _on_device(self, scalar: fx.Node, x: fx.Node) -> fx.Node:
        """A 0-d tensor on x's device, one copy a graph: a CPU scalar breaks CUDA graphs."""
        held = nodes.under_scalar_cast(scalar)
        value, like = nodes.tensor(held), nodes.tensor(x)
        assert value is not None
        assert like is not None
        if value.device == like.device:
            return held
        key = (held, like.device)
        if key not in self._moved:
            anchor = max([held, *nodes.graph_nodes(self.graph, "placeholder")])
            with self.graph.inserting_after(anchor):
                moved = self.graph.call_function(prims.device_put.default, (held, like.device))
            _set_meta(moved, held, value.to(like.device))
            self._moved[key] = moved
        return self._moved[key]

    def _results(self, fused: fx.Node, wanted: frozenset[str]) -> dict[str, fx.Node]:
        results: dict[str, fx.Node] = {}
        last = fused
        for index, name in enumerate(OUTPUTS):
            if name not in wanted:
                continue
            with self.graph.inserting_after(last):
                item = self.graph.call_function(operator.getitem, (fused, index))
            _set_meta(item, fused, fused.meta["val"][index])
            results[name] = last = item
        return results

    def _replace(self, site: Site, node: fx.Node, name: str, result: fx.Node) -> None:
        """Let the op's result stand for `node`, in the shape its readers know."""
        if node is site.reduced and node is not site.hidden:
            if any(nodes.is_op(step.node, nodes.VIEWS) for step in site.steps):
                result = self._reshaped_like(site, result)
        elif name in ("norm", "rstd"):
            for view in site.norm_views:
                if nodes.is_op(view, nodes.VIEWS):
                    result = self._norm_view(view, result, name)
        node.replace_all_uses_with(result)
        self.replaced[node] = result

    def _norm_view(self, view: fx.Node, result: fx.Node, name: str) -> fx.Node:
        copy = self._same_view(view, result, after=result)
        if name == "rstd":
            sizes = copy.args[1] if nodes.is_op(copy, nodes.RESHAPES) else None
            if isinstance(sizes, (list, tuple)):
                copy.args = (result, [*sizes[:-1], 1])
            copy.meta["val"] = copy.meta["val"][..., :1].clone()
        return copy

    def _reshaped_like(self, site: Site, result: fx.Node) -> fx.Node:
        """The reduced value in the shape it had before the chain's views."""
        assert site.x is not None
        value = nodes.tensor(site.reduced)
        assert value is not None
        source = site.all_reduce.args[0] if site.reduced is not site.all_reduce else site.x
        sizes: list[Any] = []
        last = result
        for dim, size in enumerate(value.shape):
            known = nodes.static_size(size)
            if known is not None:
                sizes.append(known)
                continue
            with self.graph.inserting_after(last):
                last = self.graph.call_function(aten.sym_size.int, (source, dim))
            last.meta["val"] = size
            sizes.append(last)
        with self.graph.inserting_after(last):
            reshaped = self.graph.call_function(aten.reshape.default, (result, sizes))
        _set_meta(reshaped, result, value)
        return reshaped

    def _erase(self, site: Site, chain: tuple[fx.Node, ...]) -> None:
        """Erase the chain from its end, then what only it read; the collective goes too."""
        for node in sorted({*chain, site.all_reduce}, reverse=True):
            if not node.users and node not in self.erased:
                self._erase_with_sources(node)
        assert site.all_reduce in self.erased, "the unfused all_reduce must not stay behind"

    def _erase_with_sources(self, node: fx.Node) -> None:
        sources = list(node.all_input_nodes)
        self.graph.erase_node(node)
        self.erased.add(node)
        for source in sources:
            pure = source.op == "call_function" and not source.is_impure()
            if not source.users and pure and source not in self.erased:
                self._erase_with_sources(source)

    def _repair_order(self, produced: list[fx.Node]) -> None:
        """Sort again if something that reads the op stands before it (a late weight)."""
        if any(user < node for node in produced for user in node.users):
            stable_topological_sort(self.graph)


def _known(node: fx.Node | None) -> fx.Node:
    assert node is not None
    return node


def _dtypes(site: Site) -> dict[str, torch.dtype | None]:
    """add_dtype and out_dtype: None where torch's own promotion gives the same."""
    assert site.norm is not None
    cast = site.step("cast")
    cast_value = None if cast is None else nodes.tensor(cast.node)
    hidden = nodes.tensor(site.norm.hidden)
    output = nodes.tensor(site.norm.output)
    assert hidden is not None
    assert output is not None
    return {
        "add_dtype": None if cast_value is None else cast_value.dtype,
        "out_dtype": None if output.dtype == hidden.dtype else output.dtype,
    }


def _without_defaults(op: torch._ops.OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out what equals the schema's default, so that the graph stays readable."""
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return {
        name: value
        for name, value in kwargs.items()
        if not (name in defaults and _equal(value, defaults[name]))
    }


def _equal(value: object, default: object) -> bool:
    if value is None or default is None:
        return value is default
    return type(value) is type(default) and value == default


def _set_meta(node: fx.Node, origin: fx.Node, value: Any) -> None:
    for key in _KEPT_META:
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
    node.meta["val"] = value

"""The text form of a graph: equal for equal graphs, whatever torch calls their parts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fx_fusion.ops  # noqa: F401  (registers the op)
from fx_fusion.graph_text import graph_text

aten = torch.ops.aten


def traced(fn: Callable[..., Any], *inputs: torch.Tensor, symbolic: bool = False) -> fx.Graph:
    """The aten graph of a function."""
    trace = make_fx(fn, tracing_mode="symbolic" if symbolic else "fake")
    return trace(*inputs).graph


def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The line of one call whose first argument is a placeholder."""
    graph = fx.Graph()
    first = graph.placeholder("anything")
    graph.output(graph.call_function(target, (first, *args), kwargs))
    return graph_text(graph).splitlines()[1]


class TestGraphText(expecttest.TestCase):
    def test_each_node_has_a_line_with_the_type_of_its_result(self) -> None:
        def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + y).to(torch.float32)

        x = torch.zeros(2, 3, dtype=torch.bfloat16)
        self.assertExpectedInline(
            graph_text(traced(fn, x, x.clone())),
            """\
p0: bf16[2, 3]
p1: bf16[2, 3]
n0: bf16[2, 3] = aten.add.Tensor(p0, p1)
n1: f32[2, 3] = aten._to_copy(n0, dtype=f32)
return n1""",
        )

    def test_symbolic_sizes_are_numbered_as_they_appear(self) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0] * x.shape[1], 8)

        self.assertExpectedInline(
            graph_text(traced(fn, torch.zeros(5, 3, 8), symbolic=True)),
            """\
p0: f32[s0, s1, 8]
n0: Sym(s0) = aten.sym_size.int(p0, 0)
n1: Sym(s1) = aten.sym_size.int(p0, 1)
n2: Sym(s0*s1) = operator.mul(n0, n1)
n3: f32[s0*s1, 8] = aten.reshape(p0, [n2, 8])
return n3""",
        )

    def test_a_tuple_shows_its_types_where_it_is_taken_apart(self) -> None:
        def fn(x: torch.Tensor) -> Any:
            values, indices = x.max(-1)
            return values, indices

        self.assertExpectedInline(
            graph_text(traced(fn, torch.zeros(2, 3))),
            """\
p0: f32[2, 3]
n0 = aten.max.dim(p0, -1)
n1: f32[2] = n0[0]
n2: i64[2] = n0[1]
return (n1, n2)""",
        )

    def test_a_tuple_that_is_returned_whole_shows_its_types(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(2, 3)
        both = graph.call_function(aten.max.dim, (x, -1))
        both.meta["val"] = (torch.empty(2), torch.empty(2, dtype=torch.int64))
        graph.output(both)
        self.assertExpectedInline(
            graph_text(graph),
            """\
p0: f32[2, 3]
n0: (f32[2], i64[2]) = aten.max.dim(p0, -1)
return n0""",
        )

    def test_nested_graphs_are_written_in_place(self) -> None:
        def fn(x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))

        self.assertExpectedInline(
            graph_text(traced(fn, torch.zeros(3))),
            """\
p0: f32[3]
n0: f32[] = aten.sum(p0)
n1: b8[] = aten.gt.Scalar(n0, 0)
g0:
    p0: f32[3]
    n0: f32[3] = aten.add.Tensor(p0, 1)
    return (n0,)
g1:
    p0: f32[3]
    n0: f32[3] = aten.sub.Tensor(p0, 1)
    return (n0,)
n2 = cond(n1, g0, g1, (p0,))
n3: f32[3] = n2[0]
return n3""",
        )

    def test_the_fused_op_names_what_it_is_given_and_hides_the_rest(self) -> None:
        graph = fx.Graph()
        x, residual, weight = (graph.placeholder(name) for name in ("x", "r", "w"))
        op = torch.ops.fx_fusion.all_reduce_add_rms_norm.default
        eps = torch.tensor(1e-6).item()  # as fp32 holds it
        fused = graph.call_function(
            op,
            (x, residual, weight, None, eps, "tp", 8),
            {"want_residual": True, "scale": 1.0, "plan": "0123456789ab"},
        )
        graph.output(graph.call_function(operator.getitem, (fused, 0)))
        self.assertExpectedInline(
            graph_text(graph),
            """\
p0
p1
p2
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='tp', world_size=8, want_residual=True)
n1 = n0[0]
return n1""",
        )

    def test_placeholders_that_are_no_tensors_show_their_kind(self) -> None:
        graph = fx.Graph()
        for name, value in {"a": None, "b": 3, "c": 2.5}.items():
            graph.placeholder(name).meta["val"] = value
        graph.output(())
        self.assertExpectedInline(
            graph_text(graph),
            """\
p0: None
p1: int
p2: float
return ()""",
        )

    def test_objects_show_where_an_op_reads_them(self) -> None:
        graph = fx.Graph()
        idle, read = graph.placeholder("mesh"), graph.placeholder("other_mesh")
        idle.meta["val"] = read.meta["val"] = object()
        group = graph.call_function(getattr, (read, "group"))
        graph.output((idle, group, idle))
        self.assertExpectedInline(
            graph_text(graph),
            """\
p0: object
n0 = builtins.getattr(p0, 'group')
return (n0,)""",
        )

    def test_a_constant_is_written_once(self) -> None:
        root = torch.nn.Module()
        root.register_buffer("table", torch.zeros(4))
        graph = fx.Graph(owning_module=None)
        first, again = graph.get_attr("table"), graph.get_attr("table")
        graph.output(graph.call_function(aten.add.Tensor, (first, again)))
        module = fx.GraphModule(root, graph)
        self.assertExpectedInline(
            graph_text(module.graph),
            """\
c0: f32[4] = constant
n0 = aten.add.Tensor(c0, c0)
return n0""",
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(aten.view.default, [4]), call(aten.reshape.default, [4])),
        (call(aten._unsafe_view.default, [4]), call(aten.reshape.default, [4])),
        (call(aten.add.Scalar, 1e-6), call(aten.add.Tensor, 9.999999974752427e-07)),
        (call(aten.mul.Scalar, 2.0), call(aten.mul.Tensor, 2)),
        (call(aten.add.Tensor, 1, alpha=1), call(aten.add.Tensor, 1)),
        (call(aten.mean.dim, [-1], False), call(aten.mean.dim, [-1])),
    ],
)
def test_spellings_of_one_computation_read_the_same(one: str, other: str) -> None:
    assert one == other


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.device("cuda", 1), "cuda:1"),
        (torch.bfloat16, "bf16"),
        (torch.channels_last, "channels_last"),
        (slice(None, 3), "slice(None, 3, None)"),
        ({"key": [1, (2.0, None)]}, "{'key': [1, (2, None)]}"),
        (float("-inf"), "-inf"),
        (Ellipsis, "..."),
        (torch.distributed.ReduceOp.SUM, "'sum'"),
        (object(), "object"),
    ],
)
def test_arguments_read_the_same_on_every_machine(value: Any, text: str) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(operator.add, (value,)))
    assert graph_text(graph).splitlines()[0] == f"n0 = operator.add({text})"


def test_the_text_holds_neither_names_nor_paths_of_the_source() -> None:
    def fn(telling_name: torch.Tensor) -> torch.Tensor:
        return telling_name * 2

    text = graph_text(traced(fn, torch.zeros(2)))
    assert "telling" not in text
    assert "/" not in text


def test_writing_a_graph_leaves_it_alone() -> None:
    graph = traced(lambda x: x * 2 + 1, torch.zeros(2))
    names = [node.name for node in graph.nodes]
    assert graph_text(graph) == graph_text(graph)
    assert [node.name for node in graph.nodes] == names

"""graph_snapshot: a call's graphs as text, before and after the pass."""

from __future__ import annotations

from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fx_fusion.errors import DataNeededError, PassFailedError, SettingError
from fx_fusion.passes import pipeline
from fx_fusion.testing import fake_group, graph_snapshot


def block_end(x: torch.Tensor, residual: torch.Tensor) -> Any:
    """An all_reduce, a residual and a norm, with a product in front."""
    y = x * 2
    dist.all_reduce(y)
    hidden = residual + y
    return F.rms_norm(hidden, (8,), eps=1e-6), hidden


def inputs() -> list[torch.Tensor]:
    return [torch.ones(4, 8), torch.ones(4, 8)]


class TestSnapshot(expecttest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        group = fake_group(2)
        group.__enter__()
        self.addCleanup(group.__exit__, None, None, None)

    def test_before(self) -> None:
        self.assertExpectedInline(
            graph_snapshot(block_end, *inputs(), when="before"),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
n0: f32[4, 8] = aten.mul.Tensor(p0, 2)
n1: f32[4, 8] = _c10d_functional.all_reduce(n0, 'sum', '0')
n2: f32[4, 8] = _c10d_functional.wait_tensor(n1)
n3: f32[4, 8] = aten.add.Tensor(p1, n2)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
return (n8, n3)""",
        )

    def test_after(self) -> None:
        self.assertExpectedInline(
            graph_snapshot(block_end, *inputs()),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
n0: f32[4, 8] = aten.mul.Tensor(p0, 2)
n1 = fx_fusion.all_reduce_add_rms_norm(n0, residual=p1, eps=1e-06, group_name='0', world_size=2, weight_form='none', want_residual=True)
n2: f32[4, 8] = n1[0]
n3: f32[4, 8] = n1[1]
return (n2, n3)""",
        )

    def test_settings(self) -> None:
        text = graph_snapshot(block_end, *inputs(), dynamic=True, deterministic=True)
        self.assertExpectedInline(
            text,
            """\
p0: Sym(s0)
p1: f32[s0, 8]
p2: f32[s0, 8]
n0: f32[s0, 8] = aten.mul.Tensor(p1, 2)
n1 = fx_fusion.all_reduce_add_rms_norm(n0, residual=p2, eps=1e-06, group_name='0', world_size=2, weight_form='none', want_residual=True, deterministic=True)
n2: f32[s0, 8] = n1[0]
n3: f32[s0, 8] = n1[1]
return (n2, n3)""",
        )

    def test_several_graphs_have_headings(self) -> None:
        def broken(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        self.assertExpectedInline(
            graph_snapshot(broken, torch.ones(2)),
            """\
graph 1 (inference)
p0: f32[2]
n0: f32[2] = aten.add.Tensor(p0, 1)
return (n0,)

graph 2 (inference)
p0: f32[2]
n0: f32[2] = aten.mul.Tensor(p0, 2)
return (n0,)""",
        )

    def test_one_kind_of_graph_can_be_chosen(self) -> None:
        x = torch.ones(2, requires_grad=True)
        self.assertExpectedInline(
            graph_snapshot(torch.exp, x, kind="backward"),
            """\
p0: f32[2]
p1: f32[2]
n0: f32[2] = aten.mul.Tensor(p1, p0)
return (n0,)""",
        )

    def test_a_nested_graph_is_shown_within_its_outer_one(self) -> None:
        def fn(x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))

        self.assertExpectedInline(
            graph_snapshot(fn, torch.ones(2)),
            """\
p0: f32[2]
g0:
    p0: f32[2]
    n0: f32[2] = aten.add.Tensor(p0, 1)
    return (n0,)
g1:
    p0: f32[2]
    n0: f32[2] = aten.sub.Tensor(p0, 1)
    return (n0,)
n0: f32[] = aten.sum(p0)
n1: b8[] = aten.gt.Scalar(n0, 0)
n2 = cond(n1, g0, g1, (p0,))
n3: f32[2] = n2[0]
return (n3,)""",
        )

    def test_a_call_that_needs_values_is_an_error(self) -> None:
        with pytest.raises(DataNeededError, match="the value of a tensor is needed here"):
            graph_snapshot(lambda x: x * x.sum().item(), torch.ones(2))

    def test_a_pass_that_failed_is_an_error_and_no_graph(self) -> None:
        fault = RuntimeError("a fault of ours")
        with mock.patch.object(pipeline, "fuse_graph", side_effect=fault):
            with pytest.raises(PassFailedError, match="a fault of ours"):
                graph_snapshot(block_end, *inputs())
            assert "all_reduce(" in graph_snapshot(block_end, *inputs(), when="before")

    def test_a_wrong_moment_or_kind_is_refused(self) -> None:
        wrong: Any = "now"
        with pytest.raises(SettingError, match="'before' or 'after'"):
            graph_snapshot(block_end, *inputs(), when=wrong)
        with pytest.raises(SettingError, match="inference"):
            graph_snapshot(block_end, *inputs(), kind=wrong)

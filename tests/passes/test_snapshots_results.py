"""Which results of the fused op are read, by whom, and in which kind of graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from snapshot_support import HIDDEN, SnapshotTest, before_and_after, ones, reduced
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The shortest spelling, so that the texts show the results."""
    return F.rms_norm(h, (HIDDEN,), weight, 1e-6)


def fp32(*shape: int) -> torch.Tensor:
    return ones(*shape, dtype=torch.float32)


class RowwiseBlock(nn.Module):
    """A projection that DTensor shards by rows, with its residual and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(residual + self.projection(x))
        return normed


class TestResultSnapshots(SnapshotTest):
    def test_the_residual_goes_into_the_next_site(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            hidden = residual + reduced(x)
            normed = norm(hidden, weight)
            hidden = hidden + reduced(normed * 2)
            return norm(hidden, weight), hidden

        self.assertExpectedInline(
            before_and_after(fn, fp32(), fp32(), fp32(HIDDEN)),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = aten.pow.Tensor_Scalar(n2, 2)
n4: f32[4, 1] = aten.mean.dim(n3, [1], True)
n5: f32[4, 1] = aten.add.Tensor(n4, 1e-06)
n6: f32[4, 1] = aten.rsqrt(n5)
n7: f32[4, 8] = aten.mul.Tensor(n2, n6)
n8: f32[4, 8] = aten.mul.Tensor(n7, p2)
n9: f32[4, 8] = aten.mul.Tensor(n8, 2)
n10: f32[4, 8] = _c10d_functional.all_reduce(n9, 'sum', '0')
n11: f32[4, 8] = _c10d_functional.wait_tensor(n10)
n12: f32[4, 8] = aten.add.Tensor(n2, n11)
n13: f32[4, 8] = aten.pow.Tensor_Scalar(n12, 2)
n14: f32[4, 1] = aten.mean.dim(n13, [1], True)
n15: f32[4, 1] = aten.add.Tensor(n14, 1e-06)
n16: f32[4, 1] = aten.rsqrt(n15)
n17: f32[4, 8] = aten.mul.Tensor(n12, n16)
n18: f32[4, 8] = aten.mul.Tensor(n17, p2)
return (n18, n12)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, want_residual=True)
n1: f32[4, 8] = n0[0]
n2: f32[4, 8] = n0[1]
n3: f32[4, 8] = aten.mul.Tensor(n1, 2)
n4 = fx_fusion.all_reduce_add_rms_norm(n3, residual=n2, weight=p2, eps=1e-06, group_name='0', world_size=8, want_residual=True)
n5: f32[4, 8] = n4[0]
n6: f32[4, 8] = n4[1]
return (n5, n6)""",
        )

    def test_the_residual_is_not_read(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            return norm(residual + reduced(x), weight)

        self.assertExpectedInline(
            before_and_after(fn, fp32(), fp32(), fp32(HIDDEN)),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = aten.pow.Tensor_Scalar(n2, 2)
n4: f32[4, 1] = aten.mean.dim(n3, [1], True)
n5: f32[4, 1] = aten.add.Tensor(n4, 1e-06)
n6: f32[4, 1] = aten.rsqrt(n5)
n7: f32[4, 8] = aten.mul.Tensor(n2, n6)
n8: f32[4, 8] = aten.mul.Tensor(n7, p2)
return (n8,)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8)
n1: f32[4, 8] = n0[0]
return (n1,)""",
        )

    def test_the_reduced_value_is_read_elsewhere(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            y = reduced(x)
            return norm(residual + y, weight), y.relu()

        self.assertExpectedInline(
            before_and_after(fn, fp32(), fp32(), fp32(HIDDEN)),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = aten.pow.Tensor_Scalar(n2, 2)
n4: f32[4, 1] = aten.mean.dim(n3, [1], True)
n5: f32[4, 1] = aten.add.Tensor(n4, 1e-06)
n6: f32[4, 1] = aten.rsqrt(n5)
n7: f32[4, 8] = aten.mul.Tensor(n2, n6)
n8: f32[4, 8] = aten.mul.Tensor(n7, p2)
n9: f32[4, 8] = aten.relu(n1)
return (n8, n9)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, want_reduced=True)
n1: f32[4, 8] = n0[0]
n2: f32[4, 8] = n0[2]
n3: f32[4, 8] = aten.relu(n2)
return (n1, n3)""",
        )

    def test_the_embedding_s_sum_is_normed_and_is_the_first_residual(self) -> None:
        def fn(x: torch.Tensor, weight: torch.Tensor) -> Any:
            hidden = reduced(x)
            hidden = hidden + reduced(norm(hidden, weight) * 2)
            return norm(hidden, weight)

        self.assertExpectedInline(
            before_and_after(fn, fp32(), fp32(HIDDEN)),
            """\
p0: f32[4, 8]
p1: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.pow.Tensor_Scalar(n1, 2)
n3: f32[4, 1] = aten.mean.dim(n2, [1], True)
n4: f32[4, 1] = aten.add.Tensor(n3, 1e-06)
n5: f32[4, 1] = aten.rsqrt(n4)
n6: f32[4, 8] = aten.mul.Tensor(n1, n5)
n7: f32[4, 8] = aten.mul.Tensor(n6, p1)
n8: f32[4, 8] = aten.mul.Tensor(n7, 2)
n9: f32[4, 8] = _c10d_functional.all_reduce(n8, 'sum', '0')
n10: f32[4, 8] = _c10d_functional.wait_tensor(n9)
n11: f32[4, 8] = aten.add.Tensor(n1, n10)
n12: f32[4, 8] = aten.pow.Tensor_Scalar(n11, 2)
n13: f32[4, 1] = aten.mean.dim(n12, [1], True)
n14: f32[4, 1] = aten.add.Tensor(n13, 1e-06)
n15: f32[4, 1] = aten.rsqrt(n14)
n16: f32[4, 8] = aten.mul.Tensor(n11, n15)
n17: f32[4, 8] = aten.mul.Tensor(n16, p1)
return (n17,)
# becomes
p0: f32[4, 8]
p1: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, weight=p1, eps=1e-06, group_name='0', world_size=8, want_reduced=True)
n1: f32[4, 8] = n0[0]
n2: f32[4, 8] = n0[2]
n3: f32[4, 8] = aten.mul.Tensor(n1, 2)
n4 = fx_fusion.all_reduce_add_rms_norm(n3, residual=n2, weight=p1, eps=1e-06, group_name='0', world_size=8)
n5: f32[4, 8] = n4[0]
return (n5,)""",
        )

    def test_forward_graph_of_a_training_step(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            return norm(residual + reduced(x), weight)

        inputs = [value.requires_grad_() for value in (fp32(), fp32(), fp32(HIDDEN))]
        self.assertExpectedInline(
            before_and_after(fn, *inputs, kind="forward"),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = aten.pow.Tensor_Scalar(n2, 2)
n4: f32[4, 1] = aten.mean.dim(n3, [1], True)
n5: f32[4, 1] = aten.add.Tensor(n4, 1e-06)
n6: f32[4, 1] = aten.rsqrt(n5)
n7: f32[4, 8] = aten.mul.Tensor(n2, n6)
n8: f32[4, 8] = aten.mul.Tensor(n7, p2)
return (n8, p2, n2, n6)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, want_residual=True, want_rstd=True)
n1: f32[4, 8] = n0[0]
n2: f32[4, 8] = n0[1]
n3: f32[4, 1] = n0[3]
return (n1, p2, n2, n3)""",
        )

    def test_backward_graph_of_a_training_step(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor) -> Any:
            return norm(residual + reduced(x), torch.ones(HIDDEN)).sum()

        inputs = [value.requires_grad_() for value in (fp32(), fp32())]
        text = before_and_after(fn, *inputs, kind="backward")
        assert text.count("_c10d_functional.all_reduce(") == 1
        assert text.endswith("# left as it is")

    def test_dynamic_sizes_and_an_eps_that_became_an_input(self) -> None:
        def fn(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
        ) -> Any:
            hidden = residual + reduced(x)
            square = hidden.pow(2).mean(-1, keepdim=True)
            return weight * (hidden * torch.rsqrt(square + eps)), hidden

        inputs = fp32(), fp32(), fp32(HIDDEN), 1e-5
        torch._dynamo.mark_static(inputs[2])
        torch._dynamo.mark_static(inputs[0], 1)
        torch._dynamo.mark_static(inputs[1], 1)
        self.assertExpectedInline(
            before_and_after(fn, *inputs, dynamic=True),
            """\
p0: Sym(s0)
p1: f32[s0, 8]
p2: f32[s0, 8]
p3: f64[]
p4: f32[8]
n0: f32[s0, 8] = _c10d_functional.all_reduce(p1, 'sum', '0')
n1: f32[s0, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[s0, 8] = aten.add.Tensor(p2, n1)
n3: f32[s0, 8] = aten.pow.Tensor_Scalar(n2, 2)
n4: f32[s0, 1] = aten.mean.dim(n3, [-1], True)
n5: f32[] = prims.convert_element_type(p3, f32)
n6: f32[s0, 1] = aten.add.Tensor(n4, n5)
n7: f32[s0, 1] = aten.rsqrt(n6)
n8: f32[s0, 8] = aten.mul.Tensor(n2, n7)
n9: f32[s0, 8] = aten.mul.Tensor(p4, n8)
return (n9, n2)
# becomes
p0: Sym(s0)
p1: f32[s0, 8]
p2: f32[s0, 8]
p3: f64[]
p4: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p1, residual=p2, weight=p4, eps=0, group_name='0', world_size=8, eps_tensor=p3, want_residual=True)
n1: f32[s0, 8] = n0[0]
n2: f32[s0, 8] = n0[1]
return (n1, n2)""",
        )

    def test_dtensor_s_rowwise_projection(self) -> None:
        block = RowwiseBlock()
        mesh = init_device_mesh("cpu", (8,))
        parallelize_module(block, mesh, {"projection": RowwiseParallel()})
        inputs = fp32(4, 2), fp32()
        self.assertExpectedInline(
            before_and_after(block, *inputs),
            """\
p0: f32[4, 2]
p1: f32[8, 2]
p2: f32[4, 8]
p3: f32[8]
n0: f32[2, 8] = aten.permute(p1, [1, 0])
n1: f32[4, 8] = aten.mm(p0, n0)
n2: f32[4, 8] = _c10d_functional.all_reduce(n1, 'sum', '0')
n3: f32[4, 8] = _c10d_functional.wait_tensor(n2)
n4: f32[4, 8] = aten.add.Tensor(p2, n3)
n5: f32[4, 8] = aten.pow.Tensor_Scalar(n4, 2)
n6: f32[4, 1] = aten.mean.dim(n5, [1], True)
n7: f32[4, 1] = aten.add.Tensor(n6, 1e-06)
n8: f32[4, 1] = aten.rsqrt(n7)
n9: f32[4, 8] = aten.mul.Tensor(n4, n8)
n10: f32[4, 8] = aten.mul.Tensor(n9, p3)
return (n10,)
# becomes
p0: f32[4, 2]
p1: f32[8, 2]
p2: f32[4, 8]
p3: f32[8]
n0: f32[2, 8] = aten.permute(p1, [1, 0])
n1: f32[4, 8] = aten.mm(p0, n0)
n2 = fx_fusion.all_reduce_add_rms_norm(n1, residual=p2, weight=p3, eps=1e-06, group_name='0', world_size=8)
n3: f32[4, 8] = n2[0]
return (n3,)""",
        )

    def test_a_layer_norm_stays(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor) -> Any:
            hidden = residual + reduced(x)
            centred = hidden - hidden.mean(-1, keepdim=True)
            return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)

        self.assertExpectedInline(
            before_and_after(fn, fp32(), fp32()),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 1] = aten.mean.dim(n2, [-1], True)
n4: f32[4, 8] = aten.sub.Tensor(n2, n3)
n5: f32[4, 8] = aten.pow.Tensor_Scalar(n4, 2)
n6: f32[4, 1] = aten.mean.dim(n5, [-1], True)
n7: f32[4, 1] = aten.add.Tensor(n6, 1e-06)
n8: f32[4, 1] = aten.rsqrt(n7)
n9: f32[4, 8] = aten.mul.Tensor(n4, n8)
return (n9,)
# left as it is""",
        )

    def test_two_sums_are_merged_if_asked_for(self) -> None:
        def fn(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor) -> Any:
            return F.rms_norm(residual + (reduced(a) + reduced(b)), (HIDDEN,), eps=1e-6)

        inputs = fp32(), fp32(), fp32()
        self.assertExpectedInline(
            before_and_after(fn, *inputs, merge_all_reduces=True),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[4, 8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.all_reduce(p1, 'sum', '0')
n2: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n3: f32[4, 8] = _c10d_functional.wait_tensor(n1)
n4: f32[4, 8] = aten.add.Tensor(n2, n3)
n5: f32[4, 8] = aten.add.Tensor(p2, n4)
n6: f32[4, 8] = aten.pow.Tensor_Scalar(n5, 2)
n7: f32[4, 1] = aten.mean.dim(n6, [1], True)
n8: f32[4, 1] = aten.add.Tensor(n7, 1e-06)
n9: f32[4, 1] = aten.rsqrt(n8)
n10: f32[4, 8] = aten.mul.Tensor(n5, n9)
return (n10,)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[4, 8]
n0: f32[4, 8] = aten.add.Tensor(p0, p1)
n1 = fx_fusion.all_reduce_add_rms_norm(n0, residual=p2, eps=1e-06, group_name='0', world_size=8, weight_form='none')
n2: f32[4, 8] = n1[0]
return (n2,)""",
        )

"""What may stand between the all_reduce and the norm, before and after the pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from snapshot_support import HIDDEN, SnapshotTest, before_and_after, ones, reduced


def norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The shortest spelling, so that the texts show the steps."""
    return F.rms_norm(h, (HIDDEN,), weight, 1e-6)


def fp32(*shape: int) -> torch.Tensor:
    return ones(*shape, dtype=torch.float32)


class TestStepSnapshots(SnapshotTest):
    def test_residual_second(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            return norm(reduced(x) + residual, weight)

        self.assertExpectedInline(
            before_and_after(fn, fp32(), fp32(), fp32(HIDDEN)),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.add.Tensor(n1, p1)
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

    def test_bias_before_the_residual(self) -> None:
        def fn(
            x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> Any:
            return norm(residual + (reduced(x) + bias), weight)

        inputs = fp32(), fp32(HIDDEN), fp32(), fp32(HIDDEN)
        self.assertExpectedInline(
            before_and_after(fn, *inputs),
            """\
p0: f32[4, 8]
p1: f32[8]
p2: f32[4, 8]
p3: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.add.Tensor(n1, p1)
n3: f32[4, 8] = aten.add.Tensor(p2, n2)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
n9: f32[4, 8] = aten.mul.Tensor(n8, p3)
return (n9,)
# becomes
p0: f32[4, 8]
p1: f32[8]
p2: f32[4, 8]
p3: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p2, weight=p3, bias=p1, eps=1e-06, group_name='0', world_size=8)
n1: f32[4, 8] = n0[0]
return (n1,)""",
        )

    def test_scaled_residual(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            return norm(residual + reduced(x) * 0.22, weight)

        self.assertExpectedInline(
            before_and_after(fn, fp32(), fp32(), fp32(HIDDEN)),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.mul.Tensor(n1, 0.22)
n3: f32[4, 8] = aten.add.Tensor(p1, n2)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
n9: f32[4, 8] = aten.mul.Tensor(n8, p2)
return (n9,)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, scale=0.22)
n1: f32[4, 8] = n0[0]
return (n1,)""",
        )

    def test_no_residual(self) -> None:
        def fn(x: torch.Tensor, weight: torch.Tensor) -> Any:
            return norm(reduced(x), weight)

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
return (n7,)
# becomes
p0: f32[4, 8]
p1: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, weight=p1, eps=1e-06, group_name='0', world_size=8)
n1: f32[4, 8] = n0[0]
return (n1,)""",
        )

    def test_view_between(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            hidden = residual + reduced(x).view(2, 3, HIDDEN)
            return norm(hidden, weight), hidden

        inputs = fp32(6, HIDDEN), fp32(2, 3, HIDDEN), fp32(HIDDEN)
        self.assertExpectedInline(
            before_and_after(fn, *inputs),
            """\
p0: f32[6, 8]
p1: f32[2, 3, 8]
p2: f32[8]
n0: f32[6, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[6, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[2, 3, 8] = aten.reshape(n1, [2, 3, 8])
n3: f32[2, 3, 8] = aten.add.Tensor(p1, n2)
n4: f32[2, 3, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[2, 3, 1] = aten.mean.dim(n4, [2], True)
n6: f32[2, 3, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[2, 3, 1] = aten.rsqrt(n6)
n8: f32[2, 3, 8] = aten.mul.Tensor(n3, n7)
n9: f32[2, 3, 8] = aten.mul.Tensor(n8, p2)
return (n9, n3)
# becomes
p0: f32[6, 8]
p1: f32[2, 3, 8]
p2: f32[8]
n0: f32[2, 3, 8] = aten.reshape(p0, [2, 3, 8])
n1 = fx_fusion.all_reduce_add_rms_norm(n0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, want_residual=True)
n2: f32[2, 3, 8] = n1[0]
n3: f32[2, 3, 8] = n1[1]
return (n2, n3)""",
        )

    def test_four_dimensions(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            return norm(residual + reduced(x), weight)

        shape = (2, 3, 5, HIDDEN)
        inputs = fp32(*shape), fp32(*shape), fp32(HIDDEN)
        self.assertExpectedInline(
            before_and_after(fn, *inputs),
            """\
p0: f32[2, 3, 5, 8]
p1: f32[2, 3, 5, 8]
p2: f32[8]
n0: f32[2, 3, 5, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[2, 3, 5, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[2, 3, 5, 8] = aten.add.Tensor(p1, n1)
n3: f32[2, 3, 5, 8] = aten.pow.Tensor_Scalar(n2, 2)
n4: f32[2, 3, 5, 1] = aten.mean.dim(n3, [3], True)
n5: f32[2, 3, 5, 1] = aten.add.Tensor(n4, 1e-06)
n6: f32[2, 3, 5, 1] = aten.rsqrt(n5)
n7: f32[2, 3, 5, 8] = aten.mul.Tensor(n2, n6)
n8: f32[2, 3, 5, 8] = aten.mul.Tensor(n7, p2)
return (n8,)
# becomes
p0: f32[2, 3, 5, 8]
p1: f32[2, 3, 5, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8)
n1: f32[2, 3, 5, 8] = n0[0]
return (n1,)""",
        )

    def test_cast_before_the_add_and_stream_in_fp32(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            stream = reduced(x).float() + residual
            return norm(stream, weight).to(x.dtype), stream.to(x.dtype)

        self.assertExpectedInline(
            before_and_after(fn, ones(), ones(), fp32(HIDDEN)),
            """\
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: f32[8]
n0: bf16[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: bf16[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = prims.convert_element_type(n1, f32)
n3: f32[4, 8] = aten.add.Tensor(n2, p1)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
n9: f32[4, 8] = aten.mul.Tensor(n8, p2)
n10: bf16[4, 8] = prims.convert_element_type(n9, bf16)
n11: bf16[4, 8] = prims.convert_element_type(n3, bf16)
return (n10, n11)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, add_dtype=f32, out_dtype=bf16, want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: f32[4, 8] = n0[1]
n3: bf16[4, 8] = prims.convert_element_type(n2, bf16)
return (n1, n3)""",
        )

    def test_reduced_in_place(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            y = x * 2
            dist.all_reduce(y)
            return norm(residual + y, weight)

        self.assertExpectedInline(
            before_and_after(fn, fp32(), fp32(), fp32(HIDDEN)),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = aten.mul.Tensor(p0, 2)
n1: f32[4, 8] = _c10d_functional.all_reduce(n0, 'sum', '0')
n2: f32[4, 8] = _c10d_functional.wait_tensor(n1)
n3: f32[4, 8] = aten.add.Tensor(p1, n2)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
n9: f32[4, 8] = aten.mul.Tensor(n8, p2)
return (n9,)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = aten.mul.Tensor(p0, 2)
n1 = fx_fusion.all_reduce_add_rms_norm(n0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8)
n2: f32[4, 8] = n1[0]
return (n2,)""",
        )

    def test_reduced_in_place_in_an_input(self) -> None:
        def fn(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            dist.all_reduce(x)
            return norm(residual + x, weight)

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
n9: f32[4, 8] = aten.copy_(p0, n1)
return (n8,)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, want_reduced=True)
n1: f32[4, 8] = n0[0]
n2: f32[4, 8] = n0[2]
n3: f32[4, 8] = aten.copy_(p0, n2)
return (n1,)""",
        )

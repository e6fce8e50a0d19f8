"""The norms of model codebases, before and after the pass."""

from __future__ import annotations

import torch
from snapshot_support import NormSnapshotTest

EPS = 1e-6


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """The mean square in fp32, plus eps."""
    return x.float().pow(2).mean(-1, keepdim=True) + EPS


def llama(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = h.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + EPS)
    return weight * wide.to(h.dtype)


def olmo2(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(mean_square(h))
    return (weight * wide).to(h.dtype)


def gemma(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    normed = h.float() * torch.rsqrt(mean_square(h))
    return (normed * (1.0 + weight.float())).type_as(h)


def gpt_fast(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + EPS)
    return normed.type_as(h) * weight


def t5(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    normed = h * torch.rsqrt(mean_square(h))
    return weight * normed.to(weight.dtype)


class TestModelNormSnapshots(NormSnapshotTest):
    def test_llama(self) -> None:
        self.assertExpectedInline(
            self.snapshot(llama),
            """\
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0: bf16[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: bf16[4, 8] = _c10d_functional.wait_tensor(n0)
n2: bf16[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = prims.convert_element_type(n2, f32)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [-1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
n9: bf16[4, 8] = prims.convert_element_type(n8, bf16)
n10: bf16[4, 8] = aten.mul.Tensor(p2, n9)
return (n10, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, norm_dtype=bf16, want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

    def test_olmo2_and_gpt_oss(self) -> None:
        self.assertExpectedInline(
            self.snapshot(olmo2),
            """\
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0: bf16[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: bf16[4, 8] = _c10d_functional.wait_tensor(n0)
n2: bf16[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = prims.convert_element_type(n2, f32)
n4: f32[4, 8] = prims.convert_element_type(n2, f32)
n5: f32[4, 8] = aten.pow.Tensor_Scalar(n4, 2)
n6: f32[4, 1] = aten.mean.dim(n5, [-1], True)
n7: f32[4, 1] = aten.add.Tensor(n6, 1e-06)
n8: f32[4, 1] = aten.rsqrt(n7)
n9: f32[4, 8] = aten.mul.Tensor(n3, n8)
n10: f32[4, 8] = aten.mul.Tensor(p2, n9)
n11: bf16[4, 8] = prims.convert_element_type(n10, bf16)
return (n11, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

    def test_gemma(self) -> None:
        self.assertExpectedInline(
            self.snapshot(gemma),
            """\
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0: bf16[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: bf16[4, 8] = _c10d_functional.wait_tensor(n0)
n2: bf16[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = prims.convert_element_type(n2, f32)
n4: f32[4, 8] = prims.convert_element_type(n2, f32)
n5: f32[4, 8] = aten.pow.Tensor_Scalar(n4, 2)
n6: f32[4, 1] = aten.mean.dim(n5, [-1], True)
n7: f32[4, 1] = aten.add.Tensor(n6, 1e-06)
n8: f32[4, 1] = aten.rsqrt(n7)
n9: f32[4, 8] = aten.mul.Tensor(n3, n8)
n10: f32[8] = prims.convert_element_type(p2, f32)
n11: f32[8] = aten.add.Tensor(n10, 1)
n12: f32[4, 8] = aten.mul.Tensor(n9, n11)
n13: bf16[4, 8] = prims.convert_element_type(n12, bf16)
return (n13, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, weight_form='1+w', want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

    def test_gpt_fast(self) -> None:
        self.assertExpectedInline(
            self.snapshot(gpt_fast),
            """\
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0: bf16[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: bf16[4, 8] = _c10d_functional.wait_tensor(n0)
n2: bf16[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = prims.convert_element_type(n2, f32)
n4: f32[4, 8] = aten.mul.Tensor(n3, n3)
n5: f32[4, 1] = aten.mean.dim(n4, [-1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
n9: bf16[4, 8] = prims.convert_element_type(n8, bf16)
n10: bf16[4, 8] = aten.mul.Tensor(n9, p2)
return (n10, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, norm_dtype=bf16, want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

    def test_t5(self) -> None:
        self.assertExpectedInline(
            self.snapshot(t5),
            """\
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0: bf16[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: bf16[4, 8] = _c10d_functional.wait_tensor(n0)
n2: bf16[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = prims.convert_element_type(n2, f32)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [-1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n2, n7)
n9: bf16[4, 8] = prims.convert_element_type(n8, bf16)
n10: bf16[4, 8] = aten.mul.Tensor(p2, n9)
return (n10, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, norm_dtype=bf16, want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

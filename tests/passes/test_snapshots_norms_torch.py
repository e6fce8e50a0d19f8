"""torch's own spellings of the norm, and other spellings of the root, before and after the pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from snapshot_support import HIDDEN, NormSnapshotTest, before_and_after, ones, reduced
from torch import nn

EPS = 1e-6


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """The mean square in fp32, plus eps."""
    return x.float().pow(2).mean(-1, keepdim=True) + EPS


def torch_functional(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h, (HIDDEN,), weight, EPS)


def torch_without_weight_or_eps(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h, (HIDDEN,))


def over_root(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (h.float() / torch.sqrt(mean_square(h))).to(h.dtype)


def times_one_over_root(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (h.float() * (1 / torch.sqrt(mean_square(h)))).to(h.dtype)


def power(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (h.float() * torch.pow(mean_square(h), -0.5)).to(h.dtype)


class TestTorchNormSnapshots(NormSnapshotTest):
    def test_torch_functional(self) -> None:
        self.assertExpectedInline(
            self.snapshot(torch_functional),
            """\
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0: bf16[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: bf16[4, 8] = _c10d_functional.wait_tensor(n0)
n2: bf16[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = prims.convert_element_type(n2, f32)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1e-06)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
n9: f32[4, 8] = aten.mul.Tensor(n8, p2)
n10: bf16[4, 8] = prims.convert_element_type(n9, bf16)
return (n10, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

    def test_torch_functional_in_fp32(self) -> None:
        self.assertExpectedInline(
            self.snapshot(torch_functional, torch.float32),
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
return (n8, n2)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, want_residual=True)
n1: f32[4, 8] = n0[0]
n2: f32[4, 8] = n0[1]
return (n1, n2)""",
        )

    def test_torch_without_weight_or_eps(self) -> None:
        self.assertExpectedInline(
            self.snapshot(torch_without_weight_or_eps),
            """\
p0: bf16[4, 8]
p1: bf16[4, 8]
n0: bf16[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: bf16[4, 8] = _c10d_functional.wait_tensor(n0)
n2: bf16[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = prims.convert_element_type(n2, f32)
n4: f32[4, 8] = aten.pow.Tensor_Scalar(n3, 2)
n5: f32[4, 1] = aten.mean.dim(n4, [1], True)
n6: f32[4, 1] = aten.add.Tensor(n5, 1.19209e-07)
n7: f32[4, 1] = aten.rsqrt(n6)
n8: f32[4, 8] = aten.mul.Tensor(n3, n7)
n9: bf16[4, 8] = prims.convert_element_type(n8, bf16)
return (n9, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, eps=1.19209e-07, group_name='0', world_size=8, weight_form='none', want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

    def test_torch_module(self) -> None:
        norm = nn.RMSNorm(HIDDEN, eps=1e-5)

        def fn(x: torch.Tensor, residual: torch.Tensor) -> object:
            return norm(residual + reduced(x))

        stream = ones(dtype=torch.float32)
        self.assertExpectedInline(
            before_and_after(fn, stream, stream.clone()),
            """\
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0: f32[4, 8] = _c10d_functional.all_reduce(p0, 'sum', '0')
n1: f32[4, 8] = _c10d_functional.wait_tensor(n0)
n2: f32[4, 8] = aten.add.Tensor(p1, n1)
n3: f32[4, 8] = aten.pow.Tensor_Scalar(n2, 2)
n4: f32[4, 1] = aten.mean.dim(n3, [1], True)
n5: f32[4, 1] = aten.add.Tensor(n4, 1e-05)
n6: f32[4, 1] = aten.rsqrt(n5)
n7: f32[4, 8] = aten.mul.Tensor(n2, n6)
n8: f32[4, 8] = aten.mul.Tensor(n7, p2)
return (n8,)
# becomes
p0: f32[4, 8]
p1: f32[4, 8]
p2: f32[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-05, group_name='0', world_size=8)
n1: f32[4, 8] = n0[0]
return (n1,)""",
        )

    def test_over_root(self) -> None:
        self.assertExpectedInline(
            self.snapshot(over_root),
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
n8: f32[4, 1] = aten.sqrt(n7)
n9: f32[4, 8] = aten.div.Tensor(n3, n8)
n10: bf16[4, 8] = prims.convert_element_type(n9, bf16)
n11: bf16[4, 8] = aten.mul.Tensor(p2, n10)
return (n11, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, norm_dtype=bf16, reciprocal='sqrt', want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

    def test_times_one_over_root(self) -> None:
        # From torch 2.14 on Inductor makes this rsqrt before the pass sees it, so there are two
        # texts of it.
        before, after = self.snapshot(times_one_over_root).split("# becomes")
        assert ("aten.sqrt(" in before) == ("reciprocal='1/sqrt'" in after)
        assert "fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, " in after
        assert "_c10d_functional" not in after

    def test_power(self) -> None:
        self.assertExpectedInline(
            self.snapshot(power),
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
n8: f32[4, 1] = aten.pow.Tensor_Scalar(n7, -0.5)
n9: f32[4, 8] = aten.mul.Tensor(n3, n8)
n10: bf16[4, 8] = prims.convert_element_type(n9, bf16)
n11: bf16[4, 8] = aten.mul.Tensor(p2, n10)
return (n11, n2)
# becomes
p0: bf16[4, 8]
p1: bf16[4, 8]
p2: bf16[8]
n0 = fx_fusion.all_reduce_add_rms_norm(p0, residual=p1, weight=p2, eps=1e-06, group_name='0', world_size=8, norm_dtype=bf16, reciprocal='pow', want_residual=True)
n1: bf16[4, 8] = n0[0]
n2: bf16[4, 8] = n0[1]
return (n1, n2)""",
        )

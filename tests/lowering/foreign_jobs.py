"""Stand-ins for FlashInfer and AITER with their real argument names, and what ranks run on them.

They compute what the libraries' kernels compute, with torch over the group's own collectives.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fx_fusion.errors import PlanMismatchError
from fx_fusion.lowering import foreign
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.reference import rank_order_reference
from fx_fusion.lowering.select import digest_of
from fx_fusion.settings import FusionSettings

BF16 = torch.bfloat16


def total_in_rank_order(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(x.dtype)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    group: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = residual + total_in_rank_order(x, group)
    h = hidden.float()
    norm = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (norm * (weight.float() + weight_bias)).to(x.dtype), hidden


class FlashInfer:
    """The functions of `flashinfer.comm` and `flashinfer.comm.trtllm_ar` that are called."""

    AllReduceFusionPattern = SimpleNamespace(kARResidualRMSNorm=1)

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.made = 0

    def get_trtllm_comm_module(self) -> object:
        print("compiling")
        return object()

    def create_allreduce_fusion_workspace(
        self,
        backend: str = "auto",
        world_size: Any = None,
        rank: Any = None,
        max_token_num: Any = None,
        hidden_dim: Any = None,
        dtype: Any = None,
        gpus_per_node: Any = None,
        comm_backend: Any = None,
        force_oneshot_support: bool = False,
        group: Any = None,
    ) -> Any:
        assert (backend, world_size, rank) == ("trtllm", group.size(), group.rank())
        self.made += 1
        return SimpleNamespace(
            group=group,
            elements=max_token_num * hidden_dim,
            dtype=dtype,
            destroy=lambda: self.calls.append("destroyed"),
        )

    def allreduce_fusion(
        self,
        input: torch.Tensor,
        workspace: Any,
        pattern: int,
        launch_with_pdl: bool = False,
        trigger_completion_at_end: bool = True,
        output: torch.Tensor | None = None,
        residual_out: Any = None,
        norm_out: Any = None,
        quant_out: Any = None,
        scale_out: Any = None,
        residual_in: Any = None,
        rms_gamma: Any = None,
        rms_eps: float = 1e-6,
        scale_factor: Any = None,
        layout_code: Any = None,
        use_oneshot: bool | None = None,
        fp32_acc: bool = False,
        weight_bias: float = 0.0,
    ) -> torch.Tensor:
        assert pattern == 1
        assert fp32_acc
        assert input.dim() == 2
        assert input.numel() <= workspace.elements
        assert {input.dtype, residual_in.dtype, rms_gamma.dtype} == {input.dtype}
        self.calls.append({"one_shot": use_oneshot, "pdl": launch_with_pdl})
        norm, hidden = add_norm(
            input, residual_in, rms_gamma, rms_eps, weight_bias, workspace.group
        )
        norm_out.copy_(norm)
        residual_out.copy_(hidden)
        return norm

    def trtllm_create_ipc_workspace_for_all_reduce_fusion(
        self,
        tp_rank: int,
        tp_size: int,
        max_token_num: int,
        hidden_dim: int,
        use_fp32_lamport: bool = False,
        group: Any = None,
    ) -> tuple[list[int], Any]:
        assert (tp_rank, tp_size) == (group.rank(), group.size())
        self.made += 1
        return [1], group

    def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
        self, workspace: list[int], group: Any = None
    ) -> None:
        assert workspace == [1]
        self.calls.append("destroyed")

    def trtllm_allreduce_fusion(
        self,
        allreduce_in: torch.Tensor,
        world_size: int,
        world_rank: int,
        token_num: int,
        hidden_dim: int,
        workspace_ptrs: Any,
        launch_with_pdl: bool,
        trigger_completion_at_end: bool,
        fp32_acc: bool,
        pattern_code: int,
        use_oneshot: bool | None,
        allreduce_out: Any,
        residual_in: Any,
        residual_out: Any,
        norm_out: Any,
        quant_out: Any,
        scale_out: Any,
        rms_gamma: Any,
        rms_eps: float,
        scale_factor: Any,
        layout_code: Any,
        metadata: Any = None,
    ) -> None:
        assert (token_num, hidden_dim) == tuple(allreduce_in.shape)
        assert (world_size, world_rank) == (workspace_ptrs.size(), workspace_ptrs.rank())
        assert fp32_acc
        self.calls.append({"one_shot": use_oneshot, "pdl": launch_with_pdl, "older": True})
        norm, hidden = add_norm(
            allreduce_in, residual_in, rms_gamma, rms_eps, 0.0, workspace_ptrs
        )
        norm_out.copy_(norm)
        residual_out.copy_(hidden)


def install_flashinfer(version: str) -> FlashInfer:
    made = FlashInfer()
    for name in ("flashinfer", "flashinfer.comm", "flashinfer.comm.trtllm_ar"):
        module: Any = ModuleType(name)
        for attribute in dir(made):
            if not attribute.startswith("_"):
                setattr(module, attribute, getattr(made, attribute))
        sys.modules[name] = module
    _say_version("flashinfer-python", version)
    return made


class CustomAllreduce:
    """AITER's class as its sources have it since `use_1stage`."""

    calls: list[dict[str, Any]]

    def __init__(self, group: Any, device: Any, max_size: int = 1 << 26) -> None:
        self.group, self.disabled = group, False
        type(self).calls = []

    def fused_ar_rms(
        self,
        inp: torch.Tensor,
        res_inp: torch.Tensor,
        *,
        res_out: Any = None,
        out: Any = None,
        scale_out: Any = None,
        w: torch.Tensor,
        eps: float,
        registered: bool = False,
        use_1stage: bool = False,
        gemma_norm: bool = False,
    ) -> tuple[Any, Any]:
        assert not registered
        self.calls.append({"one_stage": use_1stage, "gemma": gemma_norm})
        norm, hidden = add_norm(inp, res_inp, w, eps, float(gemma_norm), self.group)
        out.copy_(norm)
        res_out.copy_(hidden)
        return out, res_out


def install_aiter() -> type[CustomAllreduce]:
    folder = "aiter.dist.device_communicators"
    for name in ("aiter", "aiter.dist", folder, f"{folder}.custom_all_reduce"):
        sys.modules[name] = ModuleType(name)
    module: Any = sys.modules[f"{folder}.custom_all_reduce"]
    module.CustomAllreduce, module.custom_ar = CustomAllreduce, True
    _say_version("amd-aiter", "0.1.20")
    return CustomAllreduce


def _say_version(package: str, version: str) -> None:
    real = importlib.metadata.version
    metadata: Any = importlib.metadata
    metadata.version = lambda name: version if name == package else real(name)


def pretend_arch(arch: str) -> None:
    module: Any = foreign
    module.device_arch = lambda _: arch


def arguments(
    rank: int, tokens: int, hidden_size: int, kernel: str, dtype: torch.dtype, **options: Any
) -> tuple[Arguments, list[torch.Tensor]]:
    """A call's arguments on this rank, and x of all ranks."""

    def random(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    group = dist.group.WORLD
    assert group is not None
    size = group.size()
    parts = [random(tokens * 10 + r, tokens, hidden_size) for r in range(size)]
    given: dict[str, Any] = {
        "residual": random(7, tokens, hidden_size),
        "weight": random(8, hidden_size),
        "bias": None,
        "eps": 1e-6,
        "want_residual": True,
        "plan": digest_of(FusionSettings(kernel=kernel)),
        **options,
    }
    made = Arguments(parts[rank], group_name=str(group.group_name), world_size=size, **given)
    return made, parts


def differences(given: Arguments, parts: list[torch.Tensor], library: str) -> list[str]:
    """What a library's call got wrong; ["unfused"] if it wasn't taken."""
    group = dist.group.WORLD
    assert group is not None
    results = foreign.run(given, group, library)
    if results is None:
        return ["unfused"]
    expected = rank_order_reference(parts, given)
    found = []
    for name in ("norm", "residual", "reduced"):
        if not getattr(given, f"want_{name}"):
            continue
        one, two = getattr(results, name), getattr(expected, name)
        tolerance = 2.0**-7 if name == "norm" else 0.0
        if one.dtype != two.dtype or not torch.allclose(
            one.float(), two.float(), rtol=tolerance, atol=tolerance
        ):
            found.append(name)
    return found


def flashinfer_job(rank: int, world_size: int, version: str) -> dict[str, Any]:
    foreign.forget()
    fake = install_flashinfer(version)
    pretend_arch("sm_90")

    def run(
        tokens: int = 5, hidden: int = 1024, dtype: Any = BF16, **options: Any
    ) -> list[str]:
        return differences(
            *arguments(rank, tokens, hidden, "flashinfer", dtype, **options), "flashinfer"
        )

    seen = {
        "plain": run(),
        "no residual": run(residual=None, want_reduced=True),
        "no weight": run(weight=None, weight_form="none", norm_dtype=BF16),
        "1+w": run(weight_form="1+w"),
        "rounds first": run(norm_dtype=BF16),
        "bias": run(bias=torch.ones(1024, dtype=BF16)),
        "2880": run(hidden=2880),
        "fp32": run(dtype=torch.float32),
        "transposed": run(residual=torch.ones(1024, 5, dtype=BF16).t()),
        "too large": run(tokens=9000),
    }
    calls = list(fake.calls)
    fake.calls.clear()
    group = dist.group.WORLD
    assert group is not None
    foreign.close(group)
    return {
        "seen": seen,
        "calls": calls,
        "made": fake.made,
        "closed": [*fake.calls, *run()],
    }


def mismatch_job(rank: int, world_size: int) -> str:
    foreign.forget()
    install_flashinfer("0.7.4" if rank else "0.7.2.post1")
    pretend_arch("sm_90")
    try:
        differences(*arguments(rank, 5, 1024, "flashinfer", BF16), "flashinfer")
    except PlanMismatchError as error:
        return str(error)
    return "no error"


def missing_job(rank: int, world_size: int) -> tuple[list[str], str]:
    """One rank lacks the library: all take the unfused path and rank 0 says why."""
    foreign.forget()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fx_fusion.lowering.foreign").addHandler(handler)
    install_flashinfer("0.7.4" if rank == 0 else "a release without number")
    pretend_arch("sm_90")
    found: list[str] = []
    for _ in range(2):  # the second call asks nobody again
        found += differences(*arguments(rank, 5, 1024, "flashinfer", BF16), "flashinfer")
    return found, "; ".join(messages)


def aiter_job(rank: int, world_size: int) -> dict[str, Any]:
    fake = install_aiter()
    pretend_arch("gfx942")

    def run(tokens: int, hidden: int = 1024, **options: Any) -> list[str]:
        return differences(*arguments(rank, tokens, hidden, "aiter", BF16, **options), "aiter")

    seen = {
        "plain": run(5),
        "1+w": run(5, weight_form="1+w"),
        "larger": run(128),
        "no residual": run(3, residual=None, want_reduced=True),
        "rounds first": run(5, norm_dtype=BF16),
    }
    return {"seen": seen, "calls": fake.calls}


def job(rank: int, world_size: int) -> dict[str, Any]:
    """Everything in turn, in the same processes: starting them takes the longest."""
    return {
        "sound": flashinfer_job(rank, world_size, "0.7.2.post1"),
        "old": flashinfer_job(rank, world_size, "0.6.3"),
        "mismatch": mismatch_job(rank, world_size),
        "missing": missing_job(rank, world_size),
        "aiter": aiter_job(rank, world_size),
    }

"""Opaque ops of other libraries: found by their rows, right on real ranks, checked when registered."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import opaque_stubs
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fx_fusion
from fx_fusion.errors import RegistrationError
from fx_fusion.passes import registry
from fx_fusion.report import Reason
from fx_fusion.testing import fake_group, graph_snapshot, spawn

HIDDEN = 64
Code = Callable[..., Any]


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, funcol).all_reduce(x, "sum", dist.group.WORLD))


def writing(namespace: str, name: str) -> Code:
    def code(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        op = getattr(getattr(torch.ops, namespace), name)
        h = r + all_reduce(x)
        return opaque_stubs.into(op, h, w), h

    return code


def adding(namespace: str, name: str) -> Code:
    def code(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        y, h = all_reduce(x), r.clone()
        getattr(getattr(torch.ops, namespace), name)(y, h, w, 1e-6)
        return y, h

    return code


def vllm_ir(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
    h = r + all_reduce(x)
    return torch.ops.vllm_ir.rms_norm(h, w, 1e-6), h


def vllm_all_reduce(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
    h = r + torch.ops.vllm.all_reduce(x, "tp:0")
    return torch.nn.functional.rms_norm(h, (HIDDEN,), w, 1e-6), h


CODES: dict[str, Code] = {
    "flashinfer::rmsnorm": writing("flashinfer", "rmsnorm"),
    "flashinfer::gemma_rmsnorm": writing("flashinfer", "gemma_rmsnorm"),
    "flashinfer::fused_add_rmsnorm": adding("flashinfer", "fused_add_rmsnorm"),
    "_C::rms_norm": writing("_C", "rms_norm"),
    "_C::fused_add_rms_norm": adding("_C", "fused_add_rms_norm"),
    "vllm_ir::rms_norm": vllm_ir,
    "vllm::all_reduce": vllm_all_reduce,
}


def vllm_is_running() -> None:
    """A stand-in for vLLM's table of groups: "tp:0" is the default group."""
    coordinator = types.SimpleNamespace(device_group=dist.group.WORLD)
    state = types.ModuleType("vllm.distributed.parallel_state")
    state._groups = {"tp:0": lambda: coordinator}  # type: ignore[attr-defined]
    sys.modules["vllm.distributed.parallel_state"] = state


@pytest.fixture
def group() -> Iterator[None]:
    opaque_stubs.define()
    with fake_group(2), torch.no_grad():
        yield
    sys.modules.pop("vllm.distributed.parallel_state", None)


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    x = torch.empty(8, HIDDEN, dtype=dtype)
    return x, torch.empty_like(x), torch.empty(HIDDEN, dtype=dtype)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", CODES)
def test_the_op_is_found_and_replaced(name: str) -> None:
    vllm_is_running()
    report = fx_fusion.explain(CODES[name])(*inputs())
    assert (report.fused_count, report.site_count) == (1, 1), str(report)
    after = graph_snapshot(CODES[name], *inputs())
    assert "fx_fusion.all_reduce_add_rms_norm" in after
    assert name.replace("::", ".") not in after


@pytest.mark.usefixtures("group")
def test_a_group_of_vllms_that_leads_nowhere_is_unknown() -> None:
    report = fx_fusion.explain(vllm_all_reduce)(*inputs())
    assert [site.reason for site in report.sites] == [Reason.GROUP_UNKNOWN]


@pytest.mark.usefixtures("group")
def test_an_argument_that_changes_the_meaning_leads_to_no_match() -> None:
    def code(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.vllm_ir.rms_norm(r + all_reduce(x), w, 1e-6, 32)

    assert fx_fusion.explain(code)(*inputs()).fused_count == 0


@pytest.mark.usefixtures("group")
def test_a_users_own_op_is_found_once_it_is_registered() -> None:
    library = cast(Any, torch.library).Library("mine", "FRAGMENT")
    library.define("norm(Tensor data, Tensor gain) -> Tensor")
    cast(Any, torch.library).register_fake(
        "mine::norm", lambda data, gain: torch.empty_like(data), lib=library
    )

    def code(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.mine.norm(r + all_reduce(x), w)

    assert fx_fusion.explain(code)(*inputs()).fused_count == 0
    key = registry.registry_key()
    fx_fusion.register_rms_norm("mine::norm", x="data", weight="gain", eps=1e-5)
    try:
        assert registry.registry_key() != key
        (site,) = fx_fusion.explain(code)(*inputs()).sites
        assert site.fused
        assert "1e-05" in site.norm
    finally:
        registry.unregister("mine::norm")
    assert registry.registry_key() == key


def test_bad_registrations_say_what_is_wrong() -> None:
    opaque_stubs.define()
    with pytest.raises(RegistrationError, match=r"no argument 'gain'.*it has: result, input"):
        fx_fusion.register_rms_norm("_C::rms_norm", out="result", eps="epsilon", weight="gain")
    with pytest.raises(RegistrationError, match="residual_out=None must be given together"):
        fx_fusion.register_rms_norm("not::yet", residual="r")
    with pytest.raises(RegistrationError, match="is not an op"):
        fx_fusion.register_all_reduce("no_namespace")


def run(rank: int, world_size: int) -> list[str]:
    """Each op on real ranks, compiled and eager, in a dtype whose sums are exact to compare."""
    del world_size
    opaque_stubs.define()
    vllm_is_running()
    found = []
    for name, code in CODES.items():
        for dtype in (torch.bfloat16, torch.float32):
            own = torch.Generator().manual_seed(rank)
            same = torch.Generator().manual_seed(9)
            x = torch.randn(8, HIDDEN, generator=own).to(dtype)
            r = torch.randn(8, HIDDEN, generator=same).to(dtype)
            w = torch.randn(HIDDEN, generator=same).to(dtype)
            torch._dynamo.reset()
            with torch.no_grad():
                fx_fusion.clear_reports()
                given = torch.compile(code, backend="fx_fusion")(x.clone(), r.clone(), w)
                expected = code(x.clone(), r.clone(), w)
            if fx_fusion.reports()[-1].fused_count != 1:
                found.append(f"{name}, {dtype}: not fused")
            if not torch.equal(given[1], expected[1]):
                found.append(f"{name}, {dtype}: hidden state differs")
            bound = 2 * torch.finfo(dtype).eps
            if not torch.allclose(given[0], expected[0], rtol=bound, atol=bound):
                found.append(f"{name}, {dtype}: norm differs")
    return found


def test_the_numbers_are_those_of_eager() -> None:
    for found in spawn(run, 2, timeout=300):
        assert found == []

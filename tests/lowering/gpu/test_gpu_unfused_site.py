"""The unfused path of a site in generated GPU code, over a driver that writes launches down."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from stub_driver import stub, stubbed, taken

from fx_fusion.lowering import gpu_local, gpu_site, gpu_unfused_site
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.testing import fake_group

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C compiler")

HIDDEN, ROWS = 2880, 8
BF16 = torch.bfloat16
STREAM = 0x5000


@pytest.fixture
def machine() -> gpu_local.Machine:
    """An H200."""
    return gpu_local.Machine("sm_90", 132, ctypes.c_void_p(1))


@pytest.fixture
def on_a_gpu(machine: gpu_local.Machine) -> Iterator[None]:
    """Calls stay on the unfused path, on that GPU as far as launches go."""
    with (
        stubbed(None),
        mock.patch.object(gpu_local, "device_arch", return_value="sm_90"),
        mock.patch.object(gpu_unfused_site, "device_arch", return_value="sm_90"),
        mock.patch.object(gpu_local, "machine_of", return_value=machine),
    ):
        yield


@pytest.fixture
def name(on_a_gpu: None) -> Iterator[str]:
    with fake_group(2) as group:
        yield group.group_name


class Call:
    """The tensors of a call."""

    def __init__(self, rows: int = ROWS, wants_reduced: bool = False) -> None:
        self.rows = rows
        self.x, self.residual = (torch.randn(rows, HIDDEN).to(BF16) for _ in range(2))
        self.weight = torch.rand(HIDDEN).to(BF16)
        self.norm, self.hidden = (torch.full_like(self.x, torch.nan) for _ in range(2))
        self.reduced = torch.full_like(self.x, torch.nan)
        self.wants_reduced = wants_reduced

    def run(self, site: Any, stream: int = STREAM) -> None:
        reduced = self.reduced if self.wants_reduced else None
        results = (self.norm, self.hidden, reduced, None)
        inputs = (self.x, self.residual, self.weight, None)
        site(stream, self.rows, None, None, *inputs, *results)


def entry_of(name: str, **constants: Any) -> Any:
    return gpu_site.gpu_site(
        eps=1e-6, group_name=name, world_size=2, want_residual=True, **constants
    )


def without_python() -> Any:
    """Patch the way around the launcher, to see that it isn't taken."""
    around = gpu_unfused_site._AddAndNorm
    return mock.patch.object(around, "__call__", side_effect=AssertionError)


@pytest.mark.parametrize("overwrites", [True, False])
def test_the_second_call_is_a_collective_and_a_launch_from_c(
    name: str, overwrites: bool
) -> None:
    site = entry_of(name, may_overwrite_x=overwrites)
    for rows in (ROWS, 3):
        Call(rows).run(site)  # Python's; on a CPU tensor it launches nothing
    assert taken() == []
    for rows, stream in ((ROWS, STREAM), (3, STREAM), (ROWS, STREAM + 1)):
        call = Call(rows)
        with without_python():
            call.run(site, stream)
        ((_, on, _, _, _, parameters),) = taken()
        words = [int.from_bytes(parameters[i : i + 8], "little") for i in range(0, 80, 8)]
        given = (call.residual, call.weight, None, None, None, call.norm, call.hidden)
        assert words[1:] == [*(0 if t is None else t.data_ptr() for t in given), 0, 0]
        assert (words[0] == call.x.data_ptr()) == overwrites
        assert on == stream
        assert int.from_bytes(parameters[80:84], "little") == rows


@pytest.mark.parametrize("rows", [1, ROWS, 600])
def test_the_launch_is_the_one_that_python_makes(
    name: str, machine: gpu_local.Machine, rows: int
) -> None:
    site = entry_of(name, may_overwrite_x=True, scale=0.5)
    Call(rows).run(site)
    call = Call(rows)
    with without_python():
        call.run(site)
    ours = taken()
    inputs = (call.x, call.residual, call.weight, None)
    constants: dict[str, Any] = {"eps": 1e-6, "group_name": name, "world_size": 2, "scale": 0.5}
    arguments = Arguments(*inputs, **constants, want_residual=True)
    results: Any = (call.norm, call.hidden, None, None)
    gpu_local.enqueue(call.x, arguments, machine, STREAM, Results(*results))
    assert taken() == ours
    assert len(ours) == 1


def test_what_python_runs_is_what_the_reference_says(name: str) -> None:
    call = Call(wants_reduced=True)
    x = call.x.clone()  # of a fake group of two ranks: the sum is x
    call.run(entry_of(name, want_reduced=True))
    assert torch.equal(call.reduced, x)
    assert torch.equal(call.hidden, call.residual + x)
    wanted = torch.nn.functional.rms_norm(call.hidden, (HIDDEN,), call.weight, 1e-6)
    torch.testing.assert_close(call.norm, wanted)


def test_what_is_reduced_is_written_beside_the_launch(name: str) -> None:
    site = entry_of(name, want_reduced=True, may_overwrite_x=True)
    Call(wants_reduced=True).run(site)
    call = Call(wants_reduced=True)
    with without_python():
        call.run(site)
    assert len(taken()) == 1
    assert torch.equal(call.reduced, call.x)


def test_a_misaligned_result_and_a_failing_driver_go_to_python(name: str) -> None:
    site = entry_of(name)
    Call().run(site)
    odd = Call()
    odd.norm = torch.full((ROWS * HIDDEN + 1,), torch.nan, dtype=BF16)[1:].view(ROWS, HIDDEN)
    odd.run(site)
    assert taken() == []
    assert not odd.norm.isnan().any()
    stub().stub_reset(0, 700)
    call = Call()
    call.run(site)  # the first launch may fail for want of a context, which Python repairs
    assert not call.norm.isnan().any()


def test_another_group_of_the_name_is_learned_anew(on_a_gpu: None) -> None:
    with fake_group(2) as group:
        site = entry_of(group.group_name)
        Call().run(site)
        with without_python():
            Call().run(site)
    with fake_group(2) as other:
        assert other.group_name == group.group_name
        call = Call()
        call.run(site)
        assert not call.norm.isnan().any()  # by Python
        with without_python():
            Call().run(site)
    assert len(taken()) == 2


def test_a_site_that_is_dropped_is_gone(name: str) -> None:
    """Its entry point holds the way around the launcher where Python can't see a cycle."""
    site = gpu_site.GpuSite(eps=1e-6, group_name=name, world_size=2, want_residual=True)
    Call().run(site)
    parts: list[Any] = [site._unfused, site._unfused._add_and_norm]
    kept = [weakref.ref(part) for part in parts]
    del site, parts
    assert [reference() for reference in kept] == [None, None]

"""What generated C++ calls, called as that code calls it, over a driver that writes launches down."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from stub_driver import stub, stubbed, taken, workspace_of

from fx_fusion.lowering import cpp_entry, gpu_launch, gpu_site
from fx_fusion.lowering.cpp_entry import _CppCall
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.ops import all_reduce_add_rms_norm  # noqa: F401 (registers)
from fx_fusion.testing import fake_group

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C compiler")

HIDDEN = 4096
BF16 = torch.bfloat16
STREAM = 0x5000
DONE, FAILED = 0, 2
_aoti: Any = torch._C._aoti


@pytest.fixture
def group_name() -> Iterator[str]:
    """The name of a group whose launches go to the stub driver."""
    with fake_group(2) as group:
        made = workspace_of(group.group_name)
        with stubbed(made), mock.patch.object(cpp_entry, "_SITES", {}):
            yield group.group_name


@pytest.fixture(params=["C", "ctypes"])
def entry(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The entry, in C and where that can't be built."""
    built = gpu_launch.launch_library()
    assert built.has_entry, built.cause
    if request.param == "ctypes":
        built = dataclasses.replace(built, library=None, has_entry=False)
    with (
        mock.patch.object(gpu_launch, "launch_library", return_value=built),
        mock.patch.object(gpu_site, "launch_library", return_value=built),
        mock.patch.object(cpp_entry, "launch_library", return_value=built),
    ):
        # generated code has released Python's lock, and so does ctypes
        function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(_CppCall))
        made: Any = function(cpp_entry.address.__wrapped__())
        made.kind = request.param
        yield made


def shim(name: str) -> Any:
    """A function of torch's stable C interface."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return getattr(library, name)


class Handles:
    """Tensors as generated C++ holds them."""

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype = ctypes.c_void_p
        pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        self.words = [
            None
            if tensor is None
            else pointer(_aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])[0], None)
            for tensor in tensors
        ]

    def close(self) -> None:
        """Delete the handles, as the code does."""
        delete = shim("aoti_torch_delete_tensor_object")
        for word in filter(None, self.words):
            assert delete(ctypes.c_void_p(word)) == 0


def description(group_name: str, **constants: Any) -> bytes:
    named = {"eps": 1e-6, "group_name": group_name, "world_size": 2, "want_residual": True}
    return json.dumps({"on_gpu": True, "constants": {**named, **constants}}).encode()


class Call:
    """One call of a site; `site` is the code's word for it."""

    def __init__(
        self,
        described: bytes,
        rows: int,
        site: Any = None,
        eps_tensor: Any = None,
        **numbers: float,
    ) -> None:
        self.x, self.residual = (torch.ones(rows, HIDDEN, dtype=BF16) for _ in range(2))
        self.weight = torch.ones(HIDDEN, dtype=BF16)
        self.norm, self.hidden = (torch.zeros_like(self.x) for _ in range(2))
        self.eps_tensor = eps_tensor
        self.site = ctypes.c_void_p() if site is None else site
        self.structure = _CppCall(
            bytes=ctypes.sizeof(_CppCall),
            site=ctypes.addressof(self.site),
            description=described,
            rows=rows,
            stream=STREAM,
            has_stream=1,
            address_of=ctypes.cast(shim("aoti_torch_get_data_ptr"), ctypes.c_void_p).value,
            second_of=cpp_entry._SECOND_OF(
                ctypes.cast(shim("aoti_torch_new_tensor_handle"), ctypes.c_void_p).value or 0
            ),
        )
        for index, name in enumerate(("eps", "scale")):
            self.structure.given[index] = name in numbers
            self.structure.numbers[index] = numbers.get(name, 0.0)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the kernels' order."""
        results = (self.norm, self.hidden, None, None)
        return (self.x, self.residual, self.weight, None, self.eps_tensor, None, *results)

    def run(self, entry: Any) -> int:
        handles = Handles(*self.tensors())
        self.structure.tensors[:] = handles.words
        status = int(entry(ctypes.byref(self.structure)))
        handles.close()
        return status


def addresses(launch: tuple[Any, ...]) -> list[int]:
    return [int.from_bytes(launch[5][i : i + 8], "little") for i in range(0, 80, 8)]


def test_known_calls_are_launched_from_c(group_name: str, entry: Any) -> None:
    described, site = description(group_name), ctypes.c_void_p()
    for rows in (8, 3):
        assert Call(described, rows, site).run(entry) == DONE
    assert len(taken()) == 2
    for rows, eps in ((3, None), (8, 1e-5)):
        call = Call(described, rows, site, **({} if eps is None else {"eps": eps}))
        if entry.kind == "C":
            with mock.patch.object(gpu_site.GpuSite, "_run", side_effect=AssertionError):
                assert call.run(entry) == DONE, call.structure.message
        else:
            assert call.run(entry) == DONE
        (launch,) = taken()
        assert addresses(launch) == [0 if t is None else t.data_ptr() for t in call.tensors()]
        assert launch[1] == STREAM
        numbers = torch.frombuffer(bytearray(launch[5][88:96]), dtype=torch.float32)
        assert numbers.tolist() == torch.tensor([eps or 1e-6, 1.0]).tolist()


def test_a_tensor_for_eps_is_passed_on(group_name: str, entry: Any) -> None:
    described, site = description(group_name, eps=1.0), ctypes.c_void_p()
    for number in range(2):
        call = Call(described, 8, site, eps_tensor=torch.tensor(1e-6))
        assert call.run(entry) == DONE
        (launch,) = taken()
        eps = torch.frombuffer(bytearray(launch[5][88:92]), dtype=torch.float32)
        if number == 1 and entry.kind == "C":  # without reading it
            assert addresses(launch)[4] == call.eps_tensor.data_ptr()
        else:
            assert eps == call.eps_tensor


def test_code_with_alike_sites_shares_one(group_name: str, entry: Any) -> None:
    words = [ctypes.c_void_p() for _ in range(3)]
    for word, scale in zip(words, (1.0, 1.0, 0.5), strict=True):
        assert Call(description(group_name, scale=scale), 8, word).run(entry) == DONE
    if entry.kind == "C":
        assert words[0].value == words[1].value
        assert words[0].value != words[2].value
    assert len(cpp_entry._SITES) == 2


def test_ten_thousand_calls_leave_no_handle_behind(group_name: str, entry: Any) -> None:
    call = Call(description(group_name), 8)
    kept = [tensor for tensor in call.tensors() if tensor is not None]
    before = [cast(Any, tensor)._use_count() for tensor in kept]
    handles = Handles(*call.tensors())
    call.structure.tensors[:] = handles.words
    for number in range(10_000):
        call.structure.stream = STREAM + number % 100 // 99  # another stream goes to Python
        assert entry(ctypes.byref(call.structure)) == DONE
    handles.close()
    assert [cast(Any, tensor)._use_count() for tensor in kept] == before


def test_errors_come_as_text_or_as_python_s(group_name: str, entry: Any) -> None:
    call = Call(description("no such group"), 8)
    assert call.run(entry) == FAILED
    assert call.structure.message.startswith(b"GroupError: There is no process group")
    stub().stub_reset(0, 700)
    call = Call(description(group_name), 8)
    assert call.run(entry) == FAILED
    assert b"700" in call.structure.message
    stub().stub_reset(256, 0)
    call.structure.bytes += 8  # code of another version
    call.structure.message = b""
    assert call.run(entry) == FAILED
    assert call.structure.message == b""
    if entry.kind == "C":
        raising = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.POINTER(_CppCall))(
            cpp_entry.address.__wrapped__()
        )
        call = Call(description("no such group"), 8)
        call.structure.keeps_error = 1
        with pytest.raises(Exception, match="no such group"):
            call.run(raising)


def test_threads_may_call_at_once(group_name: str, entry: Any) -> None:
    described, site = description(group_name), ctypes.c_void_p()
    assert Call(described, 8, site).run(entry) == DONE
    taken()
    failed: list[bytes] = []

    def calls() -> None:
        for _ in range(30):
            call = Call(described, 8, site)
            if call.run(entry) != DONE:
                failed.append(call.structure.message)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(taken()) == 120


def test_the_op_tells_the_address() -> None:
    assert torch.ops.fx_fusion.import_fx_fusion.ops() == cpp_entry.address()

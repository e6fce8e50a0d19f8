"""What generated C++ calls: the address it asks for, and the sites behind it.

The entry is `fx_fusion_call_site` of the launcher in C (csrc/cpp_entry.h). Where that can't be
built, for want of a C compiler or of Python's headers, it is a function of this module, through
ctypes: the code runs all the same, but a call costs more.

`cpp_code` writes the code.
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from typing import Any, Final, cast

import torch

from fx_fusion.lowering.cpu_site import CpuSite
from fx_fusion.lowering.gpu_launch import ARRAYS, launch_library

_DONE: Final = 0
_FAILED: Final = 2
_EPS, _SCALE = 4, 5
# torch leaves it untyped
_tensors_of: Final = cast(Any, torch._C)._aoti.alloc_tensors_by_stealing_from_void_ptrs

_SITES: Final[dict[str, Any]] = {}
_SITES_LOCK: Final = threading.Lock()

_SECOND_OF: Final = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)


class _CppCall(ctypes.Structure):
    """`CppCall` of csrc/cpp_entry.h."""

    _fields_ = [
        ("bytes", ctypes.c_int64),
        ("site", ctypes.c_void_p),
        ("description", ctypes.c_char_p),
        ("rows", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
        ("numbers", ctypes.c_double * 2),
        ("given", ctypes.c_int32 * 2),
        ("has_stream", ctypes.c_int32),
        ("keeps_error", ctypes.c_int32),
        ("tensors", ctypes.c_void_p * ARRAYS),
        ("address_of", ctypes.c_void_p),
        ("second_of", _SECOND_OF),
        ("message", ctypes.c_char * 1024),
    ]


_ENTRY: Final = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(_CppCall))


@functools.cache
def address() -> int:
    """The address of the function that generated C++ calls; the process keeps it."""
    launcher = launch_library()
    if not launcher.has_entry:
        return ctypes.cast(_entry(), ctypes.c_void_p).value or 0
    serve = launcher.library.fx_fusion_serve
    serve.argtypes, serve.restype = [ctypes.py_object, ctypes.py_object], None
    serve(site_of, _tensors_of)
    return ctypes.cast(launcher.library.fx_fusion_call_site, ctypes.c_void_p).value or 0


def site_of(description: str) -> Any:
    """The site of a description, made at its first use; all code with alike sites shares it.

    Args:
        description: Of `cpp_code.describe`.

    Returns:
        A callable that takes what `gpu_site.GpuSite` or `cpu_site.CpuSite` takes.
    """
    with _SITES_LOCK:
        if description not in _SITES:
            _SITES[description] = _made(**json.loads(description))
        return _SITES[description]


def _made(on_gpu: bool, constants: dict[str, Any], **_: Any) -> Any:
    for name, value in constants.items():
        if name.endswith("dtype") and value is not None:
            constants[name] = getattr(torch, value)
    if not on_gpu:
        return CpuSite(**constants)
    from fx_fusion.lowering.gpu_site import gpu_site

    return gpu_site(**constants)


@functools.cache
def _entry() -> Any:
    """The entry where there is none in C; kept for good."""
    return _ENTRY(_call_site)


def _call_site(pointer: Any) -> int:
    """Run one call and tell how it went; nothing may be raised here."""
    call = pointer.contents
    if call.bytes != ctypes.sizeof(_CppCall):
        return _FAILED
    try:
        _run(call)
    except BaseException as error:
        call.message = f"{type(error).__name__}: {error}".encode()[:1023]
        return _FAILED
    return _DONE


def _run(call: Any) -> None:
    """As `call_with_lock` of csrc/cpp_entry.h, without its launches."""
    capsules = []
    for handle in filter(None, call.tensors):
        second = ctypes.c_void_p()
        if call.second_of(handle, ctypes.byref(second)) != 0:
            raise RuntimeError("aoti_torch_new_tensor_handle of torch failed")
        capsules.append(_capsule_of(second))
    made = iter(_tensors_of(capsules))
    tensors = [next(made) if handle else None for handle in call.tensors]
    numbers = [
        number if given else tensor
        for number, given, tensor in zip(
            call.numbers, call.given, tensors[_EPS : _SCALE + 1], strict=True
        )
    ]
    given = [*numbers, *tensors[:_EPS], *tensors[_SCALE + 1 :]]
    if call.has_stream:
        given = [call.stream, call.rows, *given]
    site_of(call.description.decode())(*given)


def _capsule_of(handle: ctypes.c_void_p) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(handle, None, None)

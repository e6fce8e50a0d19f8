"""Stand-ins for a call's tensors: same shapes, dtypes and devices, no data, and no memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

#: How deep the attributes of an argument are searched for tensors.
_DEPTH = 4


def fake_mode_for(modules: Iterable[nn.Module], values: Iterable[object]) -> FakeTensorMode:
    """The mode that a call with these modules and arguments can run under.

    It is the one in use already, where modules or arguments were made under one.
    """
    tensors = [*_tensors_of(modules), *(v for v in values if isinstance(v, torch.Tensor))]
    found = detect_fake_mode(tensors)
    return FakeTensorMode(allow_non_fake_inputs=True) if found is None else found


def device_of(values: Iterable[object]) -> torch.device:
    """Where a call is meant to run: where its first tensor is that isn't on meta, else the CPU."""
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return value.device
    return torch.device("cpu")


def off_meta(modules: Iterable[nn.Module], mode: FakeTensorMode, device: torch.device) -> None:
    """Give modules fake tensors on `device` in place of parameters and buffers on meta.

    Inductor drops computations on the meta device, as nobody could read their results. The
    caller puts the modules back (`isolation.modules_untouched`).
    """
    made: dict[int, torch.Tensor] = {}  # by id, as layers may share a parameter
    for part in _parts(modules):
        tables: list[dict[str, Any]] = [part._parameters, part._buffers]
        for held in tables:
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _on_device(tensor, mode, device)
                held[name] = made[id(tensor)]


def _on_device(
    tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device
) -> torch.Tensor:
    with mode, torch.no_grad():
        moved = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(moved, requires_grad=tensor.requires_grad)
        return moved.requires_grad_(tensor.requires_grad)


def _parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules in these, each once."""
    return list({id(part): part for whole in modules for part in whole.modules()}.values())


def _tensors_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def as_fake(values: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """The same arguments with fake tensors in place of tensors.

    Objects that hold tensors (a cache, a dataclass) are copied, so that what the call does to
    them isn't seen outside; modules stay what they are.

    Args:
        values: Arguments, nested as they may be.
        mode: What the fake tensors belong to.
        device: Where those on the meta device are to be.
    """

    def convert(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return _fake(value, mode, device)
        if _holds_tensors(value, _DEPTH):
            with FakeCopyMode(mode):
                return copy.deepcopy(value)
        return value

    return pytree.tree_map(convert, values)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    if tensor.is_meta:
        fake = _on_device(tensor, mode, device)
    elif isinstance(tensor, FakeTensor):
        return tensor
    else:
        fake = mode.from_tensor(tensor, static_shapes=True)
    for name, value in vars(tensor).items():
        if name.startswith("_dynamo_"):  # marks that torch._dynamo.mark_dynamic sets
            setattr(fake, name, value)
    return fake


def _holds_tensors(value: object, depth: int) -> bool:
    """True for an object with tensors among its attributes; not for modules."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (nn.Module, type, str, bytes, int, float, complex)):
        return False
    if isinstance(value, dict):
        return any(_holds_tensors(part, depth - 1) for part in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_tensors(part, depth - 1) for part in value)
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        if callable(value):
            return False
        return any(_holds_tensors(part, depth - 1) for part in vars(value).values())
    return False

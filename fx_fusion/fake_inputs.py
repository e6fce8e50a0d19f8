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


def on_meta(modules: Iterable[nn.Module]) -> bool:
    """True if a parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors_of(modules))


def _tensors_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def as_fake(values: Any, mode: FakeTensorMode, *, meta: bool = False) -> Any:
    """The same arguments with fake tensors in place of tensors.

    Objects that hold tensors (a cache, a dataclass) are copied, so that what the call does to
    them isn't seen outside; modules stay what they are.

    Args:
        values: Arguments, nested as they may be.
        mode: What the fake tensors belong to.
        meta: Put all of them on the meta device, for a model that is there.
    """

    def convert(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return _fake(value, mode, meta)
        if _holds_tensors(value, _DEPTH):
            with FakeCopyMode(mode):
                return copy.deepcopy(value)
        return value

    return pytree.tree_map(convert, values)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, meta: bool) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    source = torch.empty_like(tensor, device="meta") if meta else tensor
    if meta:
        source.requires_grad_(tensor.requires_grad)
    fake = mode.from_tensor(source, static_shapes=True)
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

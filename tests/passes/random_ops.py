"""Opaque ops for random programs: an all_reduce and norms of a made-up library, as stubs.

They stand for what other libraries register: functional ops, one that overwrites its
arguments, a Gemma norm, an all_reduce whose group has a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch

from fx_fusion.passes.registry import register_all_reduce, register_rms_norm, unregister

_collectives: Final = torch.ops._c10d_functional
_library: Final = cast(Any, torch.library).Library("random_graphs", "DEF")

#: A group name that the stub understands and torch does not.
NOWHERE: Final = "nowhere:"
_SCHEMAS: Final = {
    "all_reduce": "(Tensor tensor, str group_name) -> Tensor",
    "rms_norm": "(Tensor input, Tensor weight, float eps) -> Tensor",
    "rounding_rms_norm": "(Tensor input, Tensor weight, float eps) -> Tensor",
    "gemma_rms_norm_": "(Tensor(a!) out, Tensor input, Tensor weight, float eps) -> ()",
    "add_rms_norm": (
        "(Tensor input, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)"
    ),
    "add_rms_norm_": (
        "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) -> ()"
    ),
}


def _reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    name = group_name.removeprefix(NOWHERE)
    result: torch.Tensor = _collectives.wait_tensor(
        _collectives.all_reduce(tensor, "sum", name)
    )
    return result


def _normed(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    hidden32 = hidden.float()
    return hidden32 * (hidden32.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def _rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_normed(input, eps) * weight).to(input.dtype)


def _rounding_rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _normed(input, eps).to(input.dtype) * weight


def _gemma_rms_norm_(
    out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    out.copy_((_normed(input, eps) * (1 + weight.float())).to(input.dtype))


def _add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = input + residual
    return _rms_norm(hidden, weight, eps).to(input.dtype), hidden.to(input.dtype)


def _add_rms_norm_(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    residual.add_(input)
    input.copy_(_rounding_rms_norm(residual, weight, eps))


def _like_first(first: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _two_like_first(first: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like_first(first), _like_first(first)


def _nothing(*arguments: Any) -> None:
    return None


_IMPLEMENTATIONS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "all_reduce": (_reduce, _like_first),
    "rms_norm": (_rms_norm, _like_first),
    "rounding_rms_norm": (_rounding_rms_norm, _like_first),
    "gemma_rms_norm_": (_gemma_rms_norm_, _nothing),
    "add_rms_norm": (_add_rms_norm, _two_like_first),
    "add_rms_norm_": (_add_rms_norm_, _nothing),
}
for _name, (_real, _fake) in _IMPLEMENTATIONS.items():
    _library.define(_name + _SCHEMAS[_name])
    _library.impl(_name, _real, "CPU")
    torch.library.register_fake(f"random_graphs::{_name}", _fake, lib=_library)


def _torch_group(name: str) -> str | None:
    return None if name.startswith(NOWHERE) else name


@contextmanager
def registered_ops() -> Iterator[None]:
    """Make the stubs known to the pass for the length of a block."""
    register_all_reduce("random_graphs::all_reduce", resolve_group=_torch_group)
    register_rms_norm("random_graphs::rms_norm")
    register_rms_norm("random_graphs::rounding_rms_norm", cast="before_weight")
    register_rms_norm("random_graphs::gemma_rms_norm_", out="out", weight_form="1+w")
    register_rms_norm("random_graphs::add_rms_norm", residual="residual", residual_out=1)
    register_rms_norm(
        "random_graphs::add_rms_norm_",
        out="input",
        residual="residual",
        residual_out="residual",
        cast="before_weight",
    )
    try:
        yield
    finally:
        for name in _IMPLEMENTATIONS:
            unregister(f"random_graphs::{name}")


def add_rms_norm_(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The overwriting op on copies: the norm and the sum."""
    input, residual = input.clone(), residual.clone()
    torch.ops.random_graphs.add_rms_norm_(input, residual, weight, eps)
    return input, residual


def gemma_rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op that writes into a tensor it is given, into a new one."""
    out = torch.empty_like(input)
    torch.ops.random_graphs.gemma_rms_norm_(out, input, weight, eps)
    return out


def rms(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An RMSNorm by hand, rounded before the weight."""
    hidden32 = hidden.float()
    root = torch.rsqrt(hidden32.pow(2).mean(-1, keepdim=True) + 1e-06)
    return weight * (hidden32 * root).to(hidden.dtype)


def names(world: str, pair: str, one: str) -> dict[str, Any]:
    """What the text of a random program may name, for groups of these names."""
    ours = torch.ops.random_graphs

    def sum_ranks(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _collectives.wait_tensor(
            _collectives.all_reduce(x, "sum", world)
        )
        return result

    return {
        "torch": torch,
        "F": torch.nn.functional,
        "all_reduce": _collectives.all_reduce,
        "coalesced": _collectives.all_reduce_coalesced,
        "wait": _collectives.wait_tensor,
        "opaque_all_reduce": ours.all_reduce,
        "opaque_rms_norm": ours.rms_norm,
        "opaque_rounding_rms_norm": ours.rounding_rms_norm,
        "opaque_add_rms_norm": ours.add_rms_norm,
        "opaque_add_rms_norm_": add_rms_norm_,
        "opaque_gemma_rms_norm": gemma_rms_norm,
        "sum_ranks": sum_ranks,
        "rms": rms,
        "WORLD": world,
        "PAIR": pair,
        "ONE": one,
        "NOWHERE": NOWHERE + world,
    }

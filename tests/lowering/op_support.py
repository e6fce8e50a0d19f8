"""What the tests of the op share: inputs, a bitwise comparison, the call by Arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.select import digest_of
from fx_fusion.ops import all_reduce_add_rms_norm
from fx_fusion.settings import FusionSettings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
#: The op's `plan` for the unfused path, which equals eager bit by bit; kernels have their own
#: tests, and their own order of adding up a row's squares.
UNFUSED = digest_of(FusionSettings(kernel="unfused"))
ALL = {"want_norm": True, "want_residual": True, "want_reduced": True, "want_rstd": True}


def part(rank: int, *shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """A partial sum: another one on each rank."""
    generator = torch.Generator().manual_seed(1000 * (rank + 1) + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def shared(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """A tensor that is equal on all ranks: a residual, a weight, a bias."""
    generator = torch.Generator().manual_seed(7 + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def arguments_for(
    x: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_name: str = "0",
    world_size: int | None = None,
    **keywords: Any,
) -> Arguments:
    """Arguments that ask for all outputs, of the default group, unless told otherwise."""
    if "weight_form" not in keywords:
        keywords["weight_form"] = "none" if weight is None else "w"
    size = dist.get_world_size() if world_size is None else world_size
    return Arguments(x, residual, weight, bias, eps, group_name, size, **{**ALL, **keywords})


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """An eager model's all_reduce over the default group, waited for."""
    group = dist.group.WORLD
    assert group is not None
    reduced: torch.Tensor = cast(Any, funcol).wait_tensor(funcol.all_reduce(x, "sum", group))
    return reduced


def group_of_one() -> None:
    """Make the default group one real rank, this process."""
    store = cast(Any, dist).HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def call(arguments: Arguments) -> Results:
    """Call the op through the dispatcher, keyword-only arguments as keywords."""
    fields = arguments._asdict()
    positional = [fields.pop(name) for name in arguments._fields[:7]]
    return Results(*all_reduce_add_rms_norm(*positional, **fields))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers, so that signs of zero and NaN payloads count."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def ordered_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, neighbours one apart; both zeros are 0."""
    integers = bits(tensor).to(torch.int64)
    lowest = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(integers < 0, lowest - integers, integers)


def differences(given: Results, expected: Results) -> list[str]:
    """One line for each result that is not bitwise, dtype and shape equal to what's expected."""
    lines = []
    for name, a, b in zip(Results._fields, given, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            lines.append(f"{name}: {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}")
        elif not torch.equal(bits(a), bits(b)):
            count = int((bits(a) != bits(b)).sum())
            lines.append(f"{name}: {count} of {a.numel()} elements differ")
        if not a.is_contiguous():
            lines.append(f"{name}: not contiguous, strides {a.stride()}")
    return lines


def product(**choices: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the choices, as keyword dictionaries."""
    return [
        dict(zip(choices, values, strict=True))
        for values in itertools.product(*choices.values())
    ]


def describe(case: dict[str, Any]) -> str:
    """A case in one line, tensors as dtype and shape."""
    shown = {
        name: f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else value
        for name, value in case.items()
    }
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """All subsets of the names."""
    return [
        frozenset(chosen)
        for size in range(len(names) + 1)
        for chosen in itertools.combinations(names, size)
    ]

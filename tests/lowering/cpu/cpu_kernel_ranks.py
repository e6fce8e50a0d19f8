"""What runs on the ranks in the tests of the CPU kernel: calls, checked against references.

Every call's inputs differ by call and by rank, and every output of every call is checked: with
constant inputs, data left over from an earlier call would look right.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from op_support import BF16, DTYPES, FP32, arguments_for, bits, describe

from fx_fusion.lowering import cpu_kernel, select
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.cpu_workspace import CpuWorkspace, cpu_workspace
from fx_fusion.lowering.reference import rank_order_reference

SIZES = ((1, 64), (1, 2880), (2, 63), (3, 1032), (7, 5120), (8, 7168), (65, 2880), (513, 96))


def workspace() -> CpuWorkspace:
    """The default group's workspace, which must be usable."""
    group = dist.group.WORLD
    assert group is not None
    made = cpu_workspace(group.group_name, group, "a plan")
    assert made.usable, made.refusal
    return made


def random_parts(
    call: int, shape: tuple[int, ...], dtype: torch.dtype, world_size: int
) -> list[torch.Tensor]:
    """The partial sums of all ranks for one call; each rank makes all of them."""
    generator = torch.Generator().manual_seed(call)
    scale = 10.0 ** (call % 5 - 2)
    return [
        (scale * torch.randn(*shape, generator=generator)).to(dtype) for _ in range(world_size)
    ]


def cases(rank: int, world_size: int) -> Iterator[tuple[dict[str, Any], Arguments, Any]]:
    """The grid: every size and dtype, and every option at one size."""
    call = 0
    for tokens, hidden in SIZES:
        for dtype in DTYPES:
            call += 1
            yield _case(call, rank, world_size, (tokens, hidden), dtype, {})
    options: list[dict[str, Any]] = [
        {"residual": None},
        {"weight": None},
        {"residual_dtype": FP32},
        {"weight_dtype": FP32},
        {"bias": True},
        {"bias": True, "scale": 0.22},
        {"scale_tensor": torch.tensor(0.22, dtype=torch.float64)},
        {"eps_tensor": torch.tensor(1e-5)},
        {"add_dtype": FP32},
        {"norm_dtype": None},
        {"weight_form": "1+w"},
        {"weight_form": "1+w", "weight_dtype": FP32, "norm_dtype": None},
        {"reciprocal": "sqrt"},
        {"reciprocal": "pow"},
        {"out_dtype": FP32},
        {"bias": True, "scale": 3.0, "residual_dtype": FP32, "weight_dtype": FP32},
    ]
    for option in options:
        for dtype in DTYPES:
            for shape in ((3, 100), (2, 2, 2, 192)):
                call += 1
                yield _case(call, rank, world_size, shape, dtype, option)


def _case(
    call: int,
    rank: int,
    world_size: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    option: dict[str, Any],
) -> tuple[dict[str, Any], Arguments, Any]:
    option = dict(option)
    parts = random_parts(call, shape, dtype, world_size)
    generator = torch.Generator().manual_seed(1000 + call)

    def tensor(name: str, *sizes: int) -> torch.Tensor | None:
        chosen = option.pop(f"{name}_dtype", dtype)
        if option.pop(name, name != "bias") is None:
            return None
        return torch.randn(*sizes, generator=generator).to(chosen)

    wants_bias = option.pop("bias", False)
    bias = torch.randn(shape[-1], generator=generator).to(dtype) if wants_bias else None
    keywords: dict[str, Any] = {"norm_dtype": dtype}
    residual, weight = tensor("residual", *shape), tensor("weight", shape[-1])
    keywords.update(option)
    arguments = arguments_for(
        parts[rank], residual=residual, weight=weight, bias=bias, **keywords
    )
    described = {"shape": shape, "dtype": dtype, **option}
    return described, arguments, parts


def complaints(given: Results, parts: list[torch.Tensor], arguments: Arguments) -> list[str]:
    """One line for each output that breaks the contract.

    Reduced value and hidden state are bitwise the reference's, but for the sign of zero. The
    norm is within what another order of adding up the squares can change: as near to the
    exact norm of that hidden state as eager's, plus an ulp.
    """
    expected = rank_order_reference(parts, arguments)
    lines = []
    for name in ("residual", "reduced"):
        a, b = getattr(given, name), getattr(expected, name)
        if a.dtype != b.dtype or not torch.equal(bits(a + 0.0), bits(b + 0.0)):
            lines.append(f"{name}: {int((a != b).sum())} of {a.numel()} differ")
    exact = _exact_norm(expected.residual, arguments)
    for name, ulps in (("norm", 1.0), ("rstd", 2.0)):
        a, b = getattr(given, name), getattr(expected, name)
        true = getattr(exact, name)
        room = 1.5 * float(((b.double() - true) / _ulp(true, b.dtype)).abs().max()) + ulps
        worst = float(((a.double() - true) / _ulp(true, a.dtype)).abs().max())
        if a.dtype != b.dtype or a.shape != b.shape or not worst <= room:
            lines.append(f"{name}: {worst:.2f} ulp from exact, {room:.2f} allowed")
    return lines


def _exact_norm(hidden: torch.Tensor, arguments: Arguments) -> Results:
    h = hidden.double()
    eps = arguments.eps if arguments.eps_tensor is None else float(arguments.eps_tensor)
    rstd = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    norm = h * rstd
    if arguments.weight is not None:
        norm = norm * (arguments.weight.double() + (arguments.weight_form == "1+w"))
    return Results(norm, h, h, rstd)


def _ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of a dtype near `value`."""
    _, exponent = torch.frexp(value.abs().clamp(min=torch.finfo(dtype).tiny))
    return torch.ldexp(torch.full_like(value, torch.finfo(dtype).eps), exponent - 1)


def run_grid(rank: int, world_size: int, skewed: bool) -> list[str]:
    """Run the grid, twice over in another order; with `skewed` ranks sleep at random."""
    space = workspace()
    found = []
    jitter = random.Random(rank)
    for described, arguments, parts in list(cases(rank, world_size)) * 2:
        if skewed and jitter.random() < 0.2:
            time.sleep(jitter.random() * 0.01)
        given = cpu_kernel.run(arguments, space)
        lines = complaints(given, parts, arguments)
        found += [f"{describe(described)}: {line}" for line in lines]
    return found


def run_digest(rank: int, world_size: int, threads: int) -> list[str]:
    """A digest of every output, to compare ranks, runs and numbers of threads."""
    import hashlib

    torch.set_num_threads(threads)
    space = workspace()
    space.threads = threads  # by itself a rank takes no more than its share of the cores
    digests = []
    for _, arguments, _ in cases(rank, world_size):
        given = cpu_kernel.run(arguments, space)
        content = b"".join(bits(tensor).numpy().tobytes() for tensor in given)
        digests.append(hashlib.sha256(content).hexdigest())
    return digests


def run_one_row_and_batch(rank: int, world_size: int) -> list[str]:
    """A row alone, in a small batch and in one large enough for two-shot, must agree."""
    space = workspace()
    found = []
    for dtype in DTYPES:
        for hidden in (63, 2880, 4096):
            tokens = 300
            parts = random_parts(hidden, (tokens, hidden), dtype, world_size)
            residual = random_parts(1, (tokens, hidden), dtype, 1)[0]
            weight = random_parts(2, (hidden,), dtype, 1)[0]
            outputs = [
                cpu_kernel.run(
                    arguments_for(parts[rank][rows], residual=residual[rows], weight=weight),
                    space,
                )
                for rows in (slice(0, tokens), slice(5, 12), slice(7, 8))
            ]
            large, small, one = (
                [t[i] for t in o] for o, i in zip(outputs, (7, 2, 0), strict=True)
            )
            element = parts[0].element_size()
            if world_size > 2:
                assert (
                    select.cpu_is_two_shot(tokens, hidden, element, world_size) or hidden == 63
                )
            for name, a, b, c in zip(Results._fields, large, small, one, strict=True):
                if not (torch.equal(bits(a), bits(b)) and torch.equal(bits(a), bits(c))):
                    found.append(f"{name} of a row depends on its batch: {dtype}, {hidden}")
    return found


def run_forms(rank: int, world_size: int) -> list[str]:
    """The squares are added up in one order, whatever the dtype and the form compiled for it.

    The hidden state of a bfloat16 or float16 call goes through a float32 call as its residual.
    """
    space = workspace()
    found = []
    for dtype in DTYPES:
        for hidden in (1, 63, 64, 65, 127, 192, 2880, 4096):
            parts = random_parts(hidden, (5, hidden), dtype, world_size)
            residual = random_parts(1, (5, hidden), dtype, 1)[0]
            first = cpu_kernel.run(arguments_for(parts[rank], residual=residual), space)
            zeros = torch.zeros(5, hidden)
            second = cpu_kernel.run(
                arguments_for(zeros, residual=first.residual.float()), space
            )
            if not torch.equal(bits(first.rstd), bits(second.rstd)):
                found.append(f"rstd depends on the form: {dtype}, hidden size {hidden}")
    return found


def run_many(rank: int, world_size: int, calls: int) -> list[str]:
    """Many small calls with sizes at random; sums of integers, so that each is exact."""
    space = workspace()
    sizes = random.Random(5)
    found: list[str] = []
    for call in range(calls):
        tokens, hidden = sizes.choice(((1, 64), (2, 63), (5, 96), (1, 200)))
        dtype = sizes.choice((BF16, FP32))
        base = torch.arange(tokens * hidden).view(tokens, hidden)
        x = ((base * 7 + call * 3 + rank * 11) % 17).to(dtype)
        arguments = arguments_for(x, residual=None, weight=None)
        given = cpu_kernel.run(arguments, space)
        expected = sum((base * 7 + call * 3 + other * 11) % 17 for other in range(world_size))
        assert isinstance(expected, torch.Tensor)
        if not torch.equal(given.reduced.float(), expected.float()):
            found.append(f"call {call}: wrong sum")
            break
    return found


def run_two_groups(rank: int, world_size: int) -> list[str]:
    """Two groups of two and the group of all take turns; none may disturb another."""
    assert world_size == 4
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    everyone: Any = dist.group.WORLD
    for call in range(40):
        for group in (pairs[rank // 2], everyone):
            ranks = dist.get_process_group_ranks(group)
            space = cpu_workspace(group.group_name, group, "a plan")
            assert space.usable, space.refusal
            parts = random_parts(call + 100 * len(ranks) + ranks[0], (3, 80), FP32, len(ranks))
            arguments = arguments_for(
                parts[ranks.index(rank)],
                group_name=group.group_name,
                world_size=len(ranks),
            )
            given = cpu_kernel.run(arguments, space)
            found += complaints(given, parts, arguments)
    return found


def run_checks(rank: int, world_size: int) -> dict[str, list[str]]:
    """What each check of this number of ranks finds; one start of processes serves them all."""
    found = {"grid": run_grid(rank, world_size, world_size == 3)}
    if world_size < 4:
        found["batch"] = run_one_row_and_batch(rank, world_size)
    if world_size == 2:
        found["forms"] = run_forms(rank, world_size)
        found["many"] = run_many(rank, world_size, 20_000)
    return found

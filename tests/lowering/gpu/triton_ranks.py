"""Ranks that run the Triton kernel in Triton's interpreter, in processes that share files.

Each is a job for `fx_fusion.testing.spawn`. The interpreter is switched on before Triton is
imported, so these must not run in the tests' own process, which compiles.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from op_support import BF16, FP16, FP32, arguments_for, ordered_bits

from fx_fusion.errors import PeerTimeoutError
from fx_fusion.lowering import triton_build, triton_kernel, triton_layout
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.reference import eager_lines, rank_order_reference
from fx_fusion.lowering.triton_workspace import TritonWorkspace

#: x's dtype, hidden size, dtypes of residual, weight and bias, options.
FORMS: tuple[tuple[Any, ...], ...] = (
    (BF16, 63, BF16, FP32, FP16, {"scale": 0.22}),
    (BF16, 520, BF16, BF16, None, {"norm_dtype": BF16}),
    (BF16, 2048, BF16, BF16, None, {"want_reduced": False, "want_rstd": False}),
    (FP16, 520, FP16, FP16, FP16, {"reciprocal": "sqrt", "norm_dtype": FP16}),
    (FP32, 520, BF16, BF16, None, {"add_dtype": BF16, "weight_form": "1+w"}),
    (FP32, 63, None, None, FP32, {"reciprocal": "pow", "out_dtype": FP16}),
    (BF16, 4616, FP32, BF16, None, {"out_dtype": BF16}),
    (FP32, 2880, FP32, FP32, None, {"eps_tensor": torch.tensor(1e-5), "reciprocal": "1/sqrt"}),
    (FP16, 1032, BF16, None, None, {"scale_tensor": torch.tensor(0.3), "want_norm": False}),
)
#: Operations of the interpreter that take a mask, as which of their arguments.
MASKS = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}
#: Each breaks a rule of the protocol: what to replace, by what.
MUTANTS = {
    "no wait": ("tl.where(cause == 0, tl.sum(late.to(tl.int32)), 0)", "pending * 0"),
    "any flag": ("seen != turn + 1", "seen == 0"),
    "one turn": ("(turn + 1) & 3, mask", "turn & 0, mask"),
}
#: Polls after which a rank gives up, where the interpreter has no clock.
PATIENCE = 100_000


def interpret() -> None:
    """Switch the interpreter on; let it round to bfloat16 as hardware does, and keep masks."""
    os.environ["TRITON_INTERPRET"] = "1"
    module: Any = importlib.import_module("triton.runtime.interpreter")
    convert = module._convert_float

    def nearest(value: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if str(wanted) != "bf16" or str(given) != "fp32":
            return convert(value, given, wanted, rounding)
        # it cuts the mantissa off
        rounded = torch.from_numpy(numpy.array(value)).to(BF16).view(torch.int16)
        return rounded.numpy().view(numpy.uint16)

    module._convert_float = nearest
    builder = module.InterpreterBuilder
    for name, place in MASKS.items():
        setattr(builder, name, with_boolean_mask(getattr(builder, name), place))


def with_boolean_mask(create: Any, place: int) -> Any:
    """An operation of the interpreter; that of Triton 3.9 refuses masks that were combined."""

    def created(builder: Any, *arguments: Any) -> Any:
        mask = arguments[place]
        mask.data = mask.data.astype(numpy.bool_)
        return create(builder, *arguments)

    return created


def random_tensor(choice: random.Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values, among them zeros of both signs."""
    generator = torch.Generator().manual_seed(choice.randrange(2**31))
    value = torch.randn(*shape, generator=generator)
    kind = torch.rand(*shape, generator=generator)
    return torch.where(kind < 0.1, torch.where(kind < 0.05, -0.0, 0.0), value).to(dtype)


def calls_of(form: int, tokens: int, size: int, choice: random.Random) -> list[Arguments]:
    """One call as each rank makes it."""
    dtype, hidden, residual, weight, bias, options = FORMS[form]

    def tensor(kind: torch.dtype | None, *shape: int) -> torch.Tensor | None:
        return None if kind is None else random_tensor(choice, *shape, dtype=kind)

    shared = {
        "residual": tensor(residual, tokens, hidden),
        "weight": tensor(weight, hidden),
        "bias": tensor(bias, hidden),
        **options,
    }
    return [
        arguments_for(
            random_tensor(choice, tokens, hidden, dtype=dtype), world_size=size, **shared
        )
        for _ in range(size)
    ]


def wrong(given: Results, call: Arguments, expected: Results) -> list[str]:
    """Which results aren't what the contract says."""
    norm = 8 if given.norm.dtype == FP32 else 1
    if call.norm_dtype not in (None, FP32) and call.weight is not None:
        norm = 2  # a flip of the last bit, then a product that doubles it
    found = []
    for name, most in {"norm": norm, "residual": 0, "reduced": 0, "rstd": 8}.items():
        if getattr(call, f"want_{name}"):
            one, two = getattr(given, name), getattr(expected, name)
            if (one.shape, one.dtype) != (two.shape, two.dtype):
                found.append(f"{name}: shape or dtype")
            elif bool(((ordered_bits(one) - ordered_bits(two)).abs() > most).any()):
                found.append(name)
    return found


def local_forms(rank: int, world_size: int) -> list[str]:
    """What follows the sum, in every form."""
    interpret()
    choice, failed = random.Random(1), []
    for form in range(len(FORMS)):
        call = calls_of(form, 3, 1, choice)[0]
        given = triton_kernel.add_rms_norm(call)
        failed += [
            f"form {form}: {name}" for name in wrong(given, call, eager_lines(call.x, call))
        ]
    return failed


def workspace_in(folder: str, rank: int, size: int, ring: int) -> TritonWorkspace:
    """A workspace over files, with a small ring."""
    triton_layout.ring_bytes = lambda world_size: ring
    total = triton_layout.layout(size).total
    Path(folder).mkdir(exist_ok=True)
    for number in range(size if rank == 0 else 0):
        Path(folder, f"memory{number}").write_bytes(bytes(total))
    dist.barrier()
    memories = [
        torch.from_file(f"{folder}/memory{number}", shared=True, size=total, dtype=torch.uint8)
        for number in range(size)
    ]
    group = dist.group.WORLD
    assert group is not None
    workspace = TritonWorkspace(
        group,
        torch.device("cpu"),
        multiprocessors=3,
        addresses=tuple(memory.data_ptr() for memory in memories),
        timeout_nanoseconds=PATIENCE,
    )
    host = torch.zeros(17, dtype=torch.int32)
    workspace._host, workspace._host_words = host, host
    cast(Any, workspace).kept = memories
    workspace.write_table()
    return workspace


def mixed_calls(rank: int, size: int, folder: str, calls: int) -> list[str]:
    """Calls of mixed forms and sizes, some larger than the ring."""
    workspace = workspace_in(folder, rank, size, 65536)
    choice, failed = random.Random(2), []
    for number in range(calls):
        form = choice.randrange(len(FORMS))
        tokens = choice.choice((1, 2, 3, 5))
        own = calls_of(form, tokens, size, choice)
        given = triton_kernel.enqueue(own[rank], workspace)
        expected = rank_order_reference([call.x for call in own], own[0])
        failed += [
            f"call {number}, form {form}, {tokens} tokens: {name}"
            for name in wrong(given, own[rank], expected)
        ]
    workspace.check()
    return failed


def absent_rank(rank: int, size: int, folder: str) -> list[str]:
    """The last rank makes no call: the others get NaN and an error that names it, for good."""
    workspace = workspace_in(folder, rank, size, 65536)
    workspace.timeout_nanoseconds = 40
    workspace.write_table()
    choice, failed = random.Random(3), []
    for number in range(2):
        own = calls_of(1, 4, size, choice)
        if rank == size - 1:
            continue
        given = triton_kernel.enqueue(own[rank], workspace)
        if not all(bool(value.isnan().all()) for value in given):
            failed.append(f"call {number}: not all NaN")
        try:
            workspace.check()
            failed.append("nothing was raised")
        except PeerTimeoutError as error:
            if f"rank {size - 1} did not come" not in str(error):
                failed.append(str(error))
    dist.barrier()
    return failed


def overlap(rank: int, size: int, folder: str) -> list[str]:
    """A row that another launch is at work on is an error."""
    workspace = workspace_in(folder, rank, size, 65536)
    states = triton_layout.region_of(520, 2, size).states
    cast(Any, workspace).kept[rank][states : states + 4] = 255
    triton_kernel.enqueue(calls_of(1, 1, size, random.Random(4))[rank], workspace)
    try:
        workspace.check()
    except PeerTimeoutError as error:
        return [] if "two calls overlapped" in str(error) else [str(error)]
    return ["nothing was raised"]


def mutant(rank: int, size: int, folder: str, name: str) -> list[str]:
    """Calls on a kernel that breaks a rule of the protocol; what was wrong."""
    source = Path(triton_build.kernels().__file__).read_text()
    old, new = MUTANTS[name]
    assert old in source
    workspace = workspace_in(folder, rank, size, 65536)
    path = Path(folder, f"mutant{rank}.py")
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"mutant_{rank}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    choice, failed = random.Random(5), list[str]()
    with mock.patch.object(triton_build, "kernels", return_value=module):
        for number in range(5):
            own = calls_of(1, 1, size, choice)
            if number % size == rank:  # work that makes this rank come late
                torch.randn(20_000_000)
            given = triton_kernel.enqueue(own[rank], workspace)
            expected = rank_order_reference([call.x for call in own], own[0])
            failed += wrong(given, own[rank], expected)
    return failed


def protocol(rank: int, size: int, folder: str, calls: int) -> dict[str, list[str]]:
    """The jobs that share a start of processes."""
    interpret()
    failed = {"mixed calls": mixed_calls(rank, size, f"{folder}/mixed", calls)}
    if size == 2:
        failed |= {name: mutant(rank, size, f"{folder}/{name}", name) for name in MUTANTS}
    else:
        failed["absent rank"] = absent_rank(rank, size, f"{folder}/absent")
        failed["overlap"] = overlap(rank, size, f"{folder}/overlap")
    return failed

"""opcheck with real groups of two, fake against real results, and the aliasing promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_support import (
    ALL,
    BF16,
    DTYPES,
    FP32,
    arguments_for,
    call,
    describe,
    group_of_one,
    part,
    product,
    shared,
    subsets,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from fx_fusion.lowering import ops
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.testing import spawn

OUTPUTS = tuple(ALL)
INPUTS = ("residual", "weight", "bias", "eps_tensor", "scale_tensor")


def with_inputs(rank: int, chosen: frozenset[str], **keywords: Any) -> Arguments:
    """Arguments with the chosen optional inputs, of mixed dtypes."""
    inputs = {
        "residual": shared(3, 16, dtype=FP32),
        "weight": shared(16, seed=2),
        "bias": shared(16, seed=1),
        "eps_tensor": torch.tensor(1e-5, dtype=torch.float64),
        "scale_tensor": torch.tensor(0.5),
    }
    chosen_inputs: dict[str, Any] = {name: inputs[name] for name in INPUTS if name in chosen}
    return arguments_for(part(rank, 3, 16), **{**chosen_inputs, **keywords})


def opcheck(arguments: Arguments) -> dict[str, str]:
    fields = arguments._asdict()
    positional = tuple(fields.pop(name) for name in arguments._fields[:7])
    # The results are deterministic here, so the compiled ones must be equal, not close.
    outcome: dict[str, str] = torch.library.opcheck(
        ops.all_reduce_add_rms_norm, positional, fields, raise_exception=False, rtol=0, atol=0
    )
    return {test: str(result) for test, result in outcome.items() if result != "SUCCESS"}


def opcheck_every_combination(rank: int, world_size: int) -> tuple[int, list[str]]:
    cases = [
        *(with_inputs(rank, chosen) for chosen in subsets(INPUTS)),
        *(
            with_inputs(
                rank, frozenset({"residual", "weight"}), **{n: n in out for n in OUTPUTS}
            )
            for out in subsets(OUTPUTS)
        ),
    ]
    outcomes = [(case, opcheck(case)) for case in cases]
    failed = [f"{describe(case._asdict())}: {bad}" for case, bad in outcomes if bad]
    return len(cases), failed


def fake_against_real(rank: int, world_size: int) -> tuple[int, list[str]]:
    """Shape, dtype, strides and aliasing for every combination of inputs and outputs."""
    failed = []
    combinations = product(inputs=subsets(INPUTS), outputs=subsets(OUTPUTS))
    forms = product(
        dtype=DTYPES,
        add_dtype=(None, *DTYPES),
        norm_dtype=(None, BF16),
        out_dtype=(None, *DTYPES),
    )
    cases = [
        *(
            with_inputs(rank, c["inputs"], **{n: n in c["outputs"] for n in OUTPUTS})
            for c in combinations
        ),
        *(
            with_inputs(rank, frozenset({"weight"}), **form)._replace(
                x=part(rank, 3, 16, dtype=dtype)
            )
            for form in forms
            for dtype in [form.pop("dtype")]
        ),
    ]
    for arguments in cases:
        failed += [f"{describe(arguments._asdict())}: {p}" for p in problems(arguments)]
    return len(cases), failed


def problems(arguments: Arguments) -> list[str]:
    """What is wrong with the results for these arguments: metadata, contiguity, aliasing."""
    real = call(arguments)
    with FakeTensorMode() as mode:
        fields = arguments._asdict()
        tensors: dict[str, Any] = {
            name: mode.from_tensor(value)
            for name, value in fields.items()
            if isinstance(value, torch.Tensor)
        }
        fake = call(arguments._replace(**tensors))
    found = []
    for name, a, b in zip(Results._fields, real, fake, strict=True):
        if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
            found.append(f"{name} is {a.dtype}{a.shape}, its fake {b.dtype}{b.shape}")
        if not a.is_contiguous():
            found.append(f"{name} is not contiguous")
        if (a.numel() > 0) != getattr(arguments, f"want_{name}"):
            found.append(f"{name} has {a.numel()} elements")
    return found + aliases(arguments, real)


def aliases(arguments: Arguments, results: Results) -> list[str]:
    """Each result that shares its storage with an input or with another result."""
    seen: dict[int, str] = {}
    found = []
    tensors = {
        **arguments._asdict(),
        **{f"result {n}": t for n, t in results._asdict().items()},
    }
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            continue
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in seen and name.startswith("result"):
            found.append(f"{name} aliases {seen[pointer]}")
        seen.setdefault(pointer, name)
    return found


def every_function(rank: int, world_size: int) -> dict[str, tuple[int, list[str]]]:
    return {
        "opcheck": opcheck_every_combination(rank, world_size),
        "fake": fake_against_real(rank, world_size),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[int, list[str]]]]:
    return spawn(every_function, 2, timeout=180)


@pytest.mark.parametrize(("name", "cases"), [("opcheck", 48), ("fake", 512 + 96)])
def test_every_combination_of_inputs_and_outputs_passes(
    ranks: list[dict[str, tuple[int, list[str]]]], name: str, cases: int
) -> None:
    for results in ranks:
        count, failed = results[name]
        assert count == cases
        assert failed == []


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_a_group_of_one_returns_new_tensors(contiguous: bool, deterministic: bool) -> None:
    group_of_one()
    try:
        x = part(0, 4, 8, dtype=FP32)
        arguments = arguments_for(
            x if contiguous else part(0, 8, 4, dtype=FP32).t(),
            add_dtype=FP32,
            norm_dtype=FP32,
            out_dtype=FP32,
            deterministic=deterministic,
        )
        results = call(arguments)
        assert torch.equal(results.reduced, arguments.x)
        assert torch.equal(results.residual, arguments.x)
        assert aliases(arguments, results) == []
    finally:
        dist.destroy_process_group()


def test_the_arguments_tuple_is_the_schema() -> None:
    schema = ops.all_reduce_add_rms_norm._schema
    assert [argument.name for argument in schema.arguments] == list(Arguments._fields)
    assert [result.name for result in schema.returns] == list(Results._fields)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    assert defaults == Arguments._field_defaults
    assert not schema.is_mutable

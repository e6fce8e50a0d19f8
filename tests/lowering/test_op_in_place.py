"""The op that writes the hidden state over the residual: the bits of the op that doesn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_support import (
    BF16,
    FP16,
    FP32,
    UNFUSED,
    arguments_for,
    call,
    describe,
    differences,
    group_of_one,
    part,
    shared,
)
from torch import distributed as dist

from fx_fusion.errors import GradientError
from fx_fusion.lowering import ops
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.testing import spawn


def in_place(arguments: Arguments) -> Results:
    """The results of the op in place, the residual's among them; arguments stay as they are."""
    given = arguments.residual
    assert given is not None
    residual = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype)
    residual.copy_(given)
    fields = arguments._replace(residual=residual)._asdict()
    positional = [fields.pop(name) for name in arguments._fields[:7]]
    results = Results(*ops.into_residual(*positional, **fields))
    assert results.residual.numel() == 0
    results = results._replace(residual=residual)
    positional[1] = again = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype)
    again.copy_(given)
    returned = Results(*ops.over_residual(*positional, **fields))
    assert returned.residual.data_ptr() == again.data_ptr()
    off = [line for line in differences(returned, results) if "not contiguous" not in line]
    assert off == []
    return results


def cases(rank: int) -> list[Arguments]:
    """Calls of one row and of many, on the kernel and unfused, of several forms and layouts."""
    made = []
    for tokens in (0, 1, 5, 700):
        x, residual = part(rank, tokens, 80), shared(tokens, 80)
        made += [
            arguments_for(x, residual=residual, weight=shared(80, seed=1)),
            arguments_for(x, residual=residual, plan=UNFUSED),
            arguments_for(x, residual=residual.float(), bias=shared(80), scale=0.5),
            arguments_for(x, residual=residual, want_norm=False, want_reduced=False),
            arguments_for(x.half(), residual=residual.half(), weight=shared(80, dtype=FP32)),
            arguments_for(x, residual=shared(80, tokens).t(), norm_dtype=BF16),
            arguments_for(x, residual=shared(tokens, 81)[:, 1:], eps_tensor=torch.tensor(0.1)),
        ]
    return made


def compared(rank: int, world_size: int) -> list[str]:
    """What differs from the op that leaves the residual alone."""
    del world_size
    return [
        f"{describe(one._asdict())}: {line}"
        for one in cases(rank)
        for line in differences(in_place(one), Results(*map(contiguous, call(one))))
        if "not contiguous" not in line  # the residual is as it was given
    ]


def contiguous(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous()


def checked(rank: int, world_size: int) -> dict[str, str]:
    """What torch's own checks of an op say."""
    del world_size
    fields = arguments_for(part(rank, 3, 16), residual=shared(3, 16))._asdict()
    positional = tuple(fields.pop(name) for name in Arguments._fields[:7])
    found: dict[str, str] = {}
    for op in (ops.into_residual, ops.with_residual):
        outcome = torch.library.opcheck(op, positional, fields, raise_exception=False)
        found |= {f"{op} {test}": str(result) for test, result in outcome.items()}
    return found


def test_the_bits_are_those_of_the_functional_op() -> None:
    assert spawn(compared, 3, timeout=180) == [[], [], []]


def test_torchs_checks_of_an_op_pass() -> None:
    for found in spawn(checked, 2, timeout=180):
        assert len(found) >= 6
        assert set(found.values()) == {"SUCCESS"}


@pytest.fixture
def one_rank() -> Any:
    group_of_one()
    yield
    dist.destroy_process_group()


def test_autograd_sees_the_write_or_refuses(one_rank: None) -> None:
    x, residual = part(0, 2, 8, dtype=FP16), shared(2, 8, dtype=FP16)
    version = residual._version
    arguments = arguments_for(x, residual=residual)
    fields = arguments._asdict()
    positional = [fields.pop(name) for name in arguments._fields[:7]]
    ops.into_residual(*positional, **fields)
    assert residual._version > version
    positional[0] = x.clone().requires_grad_()
    with pytest.raises(GradientError, match="x"):
        ops.into_residual(*positional, **fields)
    with torch.inference_mode():
        ops.into_residual(x, residual.clone(), *positional[2:], **fields)


@pytest.mark.parametrize(
    ("residual", "wants", "text"),
    [
        (BF16, True, "residual is torch.bfloat16 and the hidden state torch.float32"),
        (FP32, False, "want_residual=False"),
    ],
)
def test_what_cannot_be_written_there_is_refused(
    one_rank: None, residual: torch.dtype, wants: bool, text: str
) -> None:
    arguments = arguments_for(
        part(0, 2, 8, dtype=FP32), residual=shared(2, 8, dtype=residual), want_residual=wants
    )
    with pytest.raises(ValueError, match=text):
        in_place(arguments)


def test_the_schemas_differ_in_the_residual_alone() -> None:
    functional = str(ops.all_reduce_add_rms_norm._schema)
    for op, residual in ((ops.with_residual, "Tensor"), (ops.into_residual, "Tensor(a!)")):
        schema = str(op._schema).replace(f"{residual} residual, T", "Tensor? residual, T", 1)
        assert schema.replace(op._opname, ops.NAME, 1) == functional
        assert op._schema.is_mutable == (residual == "Tensor(a!)")

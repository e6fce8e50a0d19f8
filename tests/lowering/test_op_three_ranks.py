"""Three ranks, where the order of summation shows; several groups; ranks out of step."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import op_support
import pytest
import torch
import torch.distributed as dist
from op_support import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    all_reduce,
    bits,
    call,
    describe,
    differences,
    group_of_one,
    part,
    product,
    shared,
)

from fx_fusion.errors import GroupError, WorldSizeError
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.reference import eager_lines, fp64_oracle, rank_order_reference
from fx_fusion.testing import spawn

arguments_for = partial(op_support.arguments_for, plan=op_support.UNFUSED)

WORLD = 3
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
SMALLEST = {BF16: 2.0**-133, FP16: 2.0**-24, FP32: 2.0**-149}


def parts_of(*shape: int, dtype: torch.dtype, world_size: int = WORLD) -> list[torch.Tensor]:
    return [part(rank, *shape, dtype=dtype) for rank in range(world_size)]


def deterministic(rank: int) -> list[str]:
    """The option against the rank-order reference, bit by bit."""
    failed = []
    forms: tuple[dict[str, Any], ...] = (
        {"norm_dtype": BF16},
        {"weight_form": "1+w", "reciprocal": "pow", "add_dtype": FP32},
        {"reciprocal": "sqrt", "scale": 0.22, "bias": shared(63, seed=1)},
    )
    shapes = ((1, 63), (5, 63), (2, 3, 63), (0, 63), (63,))
    for case in product(dtype=DTYPES, shape=shapes, form=forms, residual=(None, *DTYPES)):
        shape, dtype = case["shape"], case["dtype"]
        parts = parts_of(*shape, dtype=dtype)
        residual = None if case["residual"] is None else shared(*shape, dtype=case["residual"])
        arguments = arguments_for(
            parts[rank],
            residual=residual,
            weight=shared(63, seed=2),
            deterministic=True,
            **case["form"],
        )
        expected = rank_order_reference(parts, arguments)
        failed += [f"{describe(case)}: {d}" for d in differences(call(arguments), expected)]
    # Layout is each rank's own matter: contiguous, transposed, one element off alignment.
    for dtype in DTYPES:
        parts = parts_of(6, 63, dtype=dtype)
        mine = parts[rank]
        off = torch.empty(6 * 63 + 1, dtype=dtype)[1:].view(6, 63).copy_(mine)
        x = (mine, mine.t().contiguous().t(), off)[rank]
        arguments = arguments_for(x, deterministic=True)
        expected = rank_order_reference(parts, arguments)
        failed += [f"{dtype} layouts: {d}" for d in differences(call(arguments), expected)]
    return failed


def default(rank: int) -> list[str]:
    """Without the option, against what the group's own all_reduce gives."""
    failed = []
    for dtype in DTYPES:
        for shape in ((1, 64), (3, 2880), (2, 3, 63)):
            x = part(rank, *shape, dtype=dtype)
            arguments = arguments_for(
                x, residual=shared(*shape, dtype=dtype), weight=shared(shape[-1], seed=2)
            )
            expected = eager_lines(all_reduce(x), arguments)
            failed += [f"{dtype} {shape}: {d}" for d in differences(call(arguments), expected)]
    return failed


def error_bounds(
    arguments: Arguments, parts: list[torch.Tensor], exact: Results
) -> dict[str, torch.Tensor]:
    """How far from the exact answer rounding alone may take each result.

    u is half an ulp of the dtype, relative. The reduced value: a rounding of each partial sum
    (the group's own all_reduce rounds after each rank) and one of the result. The hidden
    state: that, and its own rounding. The norm h / rms(h) * w: the hidden state's error over
    rms and, through rms, in the mean square; then four roundings (root, product, weight, cast).
    """
    u, tiny = UNIT[parts[0].dtype], SMALLEST[parts[0].dtype]
    size = torch.stack([p.double().abs() for p in parts]).sum(0)
    reduced = len(parts) * u * size + tiny
    hidden = reduced + u * (exact.residual.abs() + reduced) + tiny
    assert arguments.weight is not None
    weight = arguments.weight.double().abs()
    drift = hidden.square().mean(-1, keepdim=True).sqrt() * exact.rstd
    norm = weight * hidden * exact.rstd + exact.norm.abs() * (drift + 4 * u)
    return {
        "reduced": reduced,
        "residual": hidden,
        "norm": 1.05 * norm + tiny,
        "rstd": 1.05 * exact.rstd * (drift + 2.0**-21),
    }


def near_the_exact_answer(rank: int) -> list[str]:
    failed = []
    for case in product(dtype=DTYPES, deterministic=(False, True), hidden=(63, 2880, 5120)):
        dtype, size = case["dtype"], case["hidden"]
        parts = parts_of(4, size, dtype=dtype)
        arguments = arguments_for(
            parts[rank],
            residual=shared(4, size, dtype=dtype),
            weight=shared(size, dtype=dtype, seed=2),
            deterministic=case["deterministic"],
        )
        exact = fp64_oracle(parts, arguments)
        given = call(arguments)
        for name, bound in error_bounds(arguments, parts, exact).items():
            off = (getattr(given, name).double() - getattr(exact, name)).abs()
            if not bool((off <= bound).all()):
                failed.append(
                    f"{describe(case)}: {name} is {float((off / bound).max()):.2f}x off"
                )
    return failed


def rows_alone_and_together(rank: int) -> list[str]:
    """With `deterministic` a row's bits don't depend on the batch that it is in."""
    x, residual, weight = part(rank, 17, 2880), shared(17, 2880), shared(2880, seed=2)
    whole = call(arguments_for(x, residual=residual, weight=weight, deterministic=True))
    failed = []
    for row in (0, 8, 16):
        one = slice(row, row + 1)
        alone = call(
            arguments_for(x[one], residual=residual[one], weight=weight, deterministic=True)
        )
        together = Results(*(result[one].clone() for result in whole))
        failed += [f"row {row}: {d}" for d in differences(alone, together)]
    return failed


def signs_of_zero(rank: int) -> list[str]:
    x = torch.full((1, 8), -0.0)
    reduced = call(arguments_for(x, deterministic=True)).reduced
    return ["a sum from +0.0 is -0.0"] if bool(torch.signbit(reduced).any()) else []


def ranks_out_of_step(rank: int) -> list[str]:
    """Each rank in turn enters the op only when the others provably wait in it."""
    signals = dist.new_group(range(WORLD), backend="gloo")
    failed = []
    token = torch.zeros(1)
    for late in range(WORLD):
        for in_rank_order in (False, True):
            parts = parts_of(2, 64, dtype=FP32)
            arguments = arguments_for(parts[rank], deterministic=in_rank_order)
            results: list[Results] = []
            entered = threading.Event()

            def enter(
                given: Arguments = arguments,
                into: list[Results] = results,
                event: threading.Event = entered,
            ) -> None:
                event.set()
                into.append(call(given))

            if rank == late:
                for other in range(WORLD):
                    if other != late:
                        dist.recv(token, other, group=signals)
                enter()
            else:
                thread = threading.Thread(target=enter)
                thread.start()
                entered.wait(30)
                if results:
                    failed.append(f"rank {rank} did not wait for rank {late}")
                dist.send(token, late, group=signals)
                thread.join(30)
            exact = fp64_oracle(parts, arguments)
            if not torch.allclose(results[0].norm.double(), exact.norm, atol=1e-5):
                failed.append(f"rank {rank}, late {late}: wrong numbers")
    return failed


def two_groups(rank: int) -> list[str]:
    """The op reduces over the group that it is given and no other."""
    pair = dist.new_group([0, 2])
    failed = []
    for size, ranks in ((3, (0, 1, 2)), (2, (0, 2)), (3, (0, 1, 2))):
        x = part(rank, 2, 16, dtype=FP32)
        name = dist.group.WORLD.group_name if size == 3 else "unknown"  # type: ignore[union-attr]
        if size == 2 and rank in ranks:
            name = pair.group_name
        arguments = arguments_for(x, group_name=name, world_size=size, deterministic=True)
        if rank not in ranks:
            try:
                call(arguments)
                failed.append("a rank outside the group could call the op")
            except GroupError:
                continue
        parts = [part(r, 2, 16, dtype=FP32) for r in ranks]
        expected = rank_order_reference(parts, arguments)
        failed += [f"{ranks}: {d}" for d in differences(call(arguments), expected)]
    return failed


def another_world_after_it(rank: int) -> list[str]:
    """The default group is made anew with one rank: the old size is refused, the new runs."""
    x = part(rank, 2, 16, dtype=FP32)
    old = arguments_for(x, world_size=WORLD)
    call(old)
    dist.barrier()
    dist.destroy_process_group()
    group_of_one()
    failed = []
    try:
        call(old)
        failed.append("the old world size was accepted")
    except WorldSizeError as error:
        if "3 ranks" not in str(error) or "has 1" not in str(error):
            failed.append(str(error))
    if not torch.equal(bits(call(old._replace(world_size=1)).reduced), bits(x)):
        failed.append("the new group gave wrong numbers")
    return failed


# The last one leaves the group behind.
CHECKS = (
    deterministic,
    default,
    near_the_exact_answer,
    rows_alone_and_together,
    signs_of_zero,
    ranks_out_of_step,
    two_groups,
    another_world_after_it,
)


def every_check(rank: int, world_size: int) -> dict[str, Any]:
    same = call(
        arguments_for(
            part(rank, 5, 2880), residual=shared(5, 2880), weight=shared(2880, seed=2)
        )
    )
    return {"results": list(same), **{check.__name__: check(rank) for check in CHECKS}}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return spawn(every_check, WORLD, timeout=120)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_three_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    assert [results[name] for results in ranks] == [[]] * WORLD


def test_all_ranks_get_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["results"]
    for other in ranks[1:]:
        for one, two in zip(first, other["results"], strict=True):
            assert torch.equal(bits(one), bits(two))

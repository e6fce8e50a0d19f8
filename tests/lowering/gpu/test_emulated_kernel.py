"""The GPU kernel's source on emulated ranks: its bits and its protocol, under random schedules.

The tests' teeth are shown by mutants of the source that have to fail.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from emulated_ranks import (
    MULTIPROCESSORS,
    Mutation,
    Ranks,
    build,
    emulated,
    small_ring,
    variant_for,
)
from op_support import BF16, FP16, FP32, ordered_bits

from fx_fusion.errors import PeerTimeoutError
from fx_fusion.lowering import gpu_layout
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.lowering.reference import rank_order_reference

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C++ compiler")

ALL = {"want_norm": True, "want_residual": True, "want_reduced": True, "want_rstd": True}
#: x's dtype, hidden size, dtypes of residual, weight and bias, options. Sizes: a part of a
#: vector, an odd number of vectors, a row over two blocks, over several segments and blocks.
FORMS: tuple[tuple[Any, ...], ...] = (
    (BF16, 63, BF16, FP32, FP16, {"scale": 0.22}),
    (BF16, 520, BF16, BF16, None, {"norm_dtype": BF16}),
    (BF16, 2048, BF16, BF16, None, {"want_reduced": False, "want_rstd": False}),
    (FP16, 520, FP16, FP16, FP16, {"reciprocal": "sqrt", "norm_dtype": FP16}),
    (FP32, 520, BF16, BF16, None, {"add_dtype": BF16, "weight_form": "1+w"}),
    (FP32, 63, None, None, FP32, {"reciprocal": "pow", "out_dtype": FP16}),
    (BF16, 4616, FP32, BF16, None, {"out_dtype": BF16}),
)
TOKENS = (1, 2, 3, 5, 9)
#: Algorithm to how many of the forms.
ONE_SHOT = {"one-shot": len(FORMS)}


def random_tensor(choice: random.Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values, among them zeros of both signs."""
    generator = torch.Generator().manual_seed(choice.randrange(2**31))
    value = torch.randn(*shape, generator=generator)
    kind = torch.rand(*shape, generator=generator)
    value = torch.where(kind < 0.1, torch.where(kind < 0.05, -0.0, 0.0), value)
    return value.to(dtype)


def arguments_of(form: int, tokens: int, size: int, choice: random.Random) -> list[Arguments]:
    """One call as each rank makes it; they differ in x and in the residual's identity only."""
    dtype, hidden, residual, weight, bias, options = FORMS[form]

    def tensor(kind: torch.dtype | None, *shape: int) -> torch.Tensor | None:
        return None if kind is None else random_tensor(choice, *shape, dtype=kind)

    options = {**ALL, **options}
    options.setdefault("weight_form", "none" if weight is None else "w")
    shared = (tensor(residual, tokens, hidden), tensor(weight, hidden), tensor(bias, hidden))
    return [
        Arguments(
            random_tensor(choice, tokens, hidden, dtype=dtype),
            *shared,
            1e-6,
            "emulated",
            size,
            **options,
        )
        for _ in range(size)
    ]


def wrong(given: Results, call: Arguments, expected: Results) -> list[str]:
    """Which results aren't what the contract says."""
    norm = 8 if given.norm.dtype == FP32 else 1
    if call.norm_dtype not in (None, FP32) and call.weight is not None:
        norm = 2  # a flip of the last bit, then a product that doubles it
    allowed = {"norm": norm, "residual": 0, "reduced": 0, "rstd": 8}
    found = []
    for name, most in allowed.items():
        if getattr(call, f"want_{name}"):
            one, two = getattr(given, name), getattr(expected, name)
            if (one.shape, one.dtype) != (two.shape, two.dtype):
                found.append(f"{name}: shape or dtype")
            elif bool(((ordered_bits(one) - ordered_bits(two)).abs() > most).any()):
                found.append(name)
    return found


def some_calls(
    ranks: Ranks, calls: int, seed: int, forms: Mapping[str, int] = ONE_SHOT
) -> list[str]:
    """Queue calls of mixed algorithms, forms and sizes, run them, compare all results."""
    choice = random.Random(seed)
    jobs = []
    for number in range(calls):
        algorithm = choice.choice(sorted(forms))
        form = choice.randrange(forms[algorithm])
        tokens = choice.choice(TOKENS if FORMS[form][1] <= 520 else (1, 2, 5))
        own = arguments_of(form, tokens, ranks.size, choice)
        given = [ranks.call(rank, call, algorithm) for rank, call in enumerate(own)]
        jobs.append((f"call {number}: {algorithm}, form {form}, {tokens} tokens", own, given))
    status = ranks.run()
    if status:
        return [f"the ranks did not come to an end ({status})"]
    failed = []
    for name, own, given in jobs:
        expected = rank_order_reference([arguments.x for arguments in own], own[0])
        for rank, results in enumerate(given):
            failed += [f"{name}, rank {rank}: {x}" for x in wrong(results, own[rank], expected)]
    return failed


def all_variants(size: int, forms: Mapping[str, int]) -> list[Any]:
    """Every variant that the forms need at any number of rows up to the most of a call."""
    choice = random.Random(0)
    found = set()
    with small_ring():
        for algorithm, count in forms.items():
            for form, (dtype, hidden, *_) in enumerate(FORMS[:count]):
                most = gpu_layout.rows_per_launch(hidden, dtype.itemsize, size, algorithm)
                for tokens in range(1, min(max(TOKENS), most) + 1):
                    arguments = arguments_of(form, tokens, size, choice)[0]
                    found.add(variant_for(arguments, algorithm))
    return sorted(found)


class Built:
    """An emulator for one world size and, of each algorithm, the first forms."""

    def __init__(
        self,
        folder: Path,
        size: int,
        forms: Mapping[str, int],
        mutate: Mutation | None = None,
    ) -> None:
        self.size, self.forms, self.variants = size, forms, all_variants(size, forms)
        self.library = build(folder, self.variants, mutate)

    def ranks(self, seed: int = 0) -> Any:
        """Emulated ranks with fresh workspaces, as a context."""
        return emulated(self.library, self.variants, self.size, seed)

    def failures(self, seed: int, calls: int) -> list[str]:
        """What was wrong in so many mixed calls."""
        with self.ranks(seed) as ranks:
            return some_calls(ranks, calls, seed, self.forms)


#: World size to the number of forms of each algorithm and of calls: an emulated thread costs
#: about a microsecond.
SIZES: dict[int, tuple[dict[str, int], int]] = {
    2: ({"one-shot": 7}, 12),
    3: ({"one-shot": 7, "two-shot": 7}, 20),
    4: ({"one-shot": 4, "two-shot": 5}, 14),
    8: ({"one-shot": 3, "two-shot": 3}, 8),
    16: ({"one-shot": 2, "two-shot": 1}, 4),
}


@pytest.fixture(scope="module", params=sorted(SIZES))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("emulator"), request.param, SIZES[request.param][0])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("three"), 3, {"one-shot": 3, "two-shot": 3})


@pytest.mark.parametrize("seed", range(3))
def test_mixed_calls_give_the_bits_of_the_contract(built: Built, seed: int) -> None:
    assert built.failures(seed, SIZES[built.size][1]) == []


def test_a_row_has_the_same_bits_in_any_batch_and_any_spread_over_blocks(three: Built) -> None:
    choice = random.Random(4)
    form = 2
    shapes = [
        gpu_layout.geometry(FORMS[form][1], 2, 3, rows, MULTIPROCESSORS, True)
        for rows in (8, 1)
    ]
    assert shapes[0].cluster != shapes[1].cluster
    whole = arguments_of(form, 8, 3, choice)
    with three.ranks() as ranks:
        together = [ranks.call(rank, arguments) for rank, arguments in enumerate(whole)]
        assert ranks.run() == 0
        for row in (0, 5, 7):
            alone = []
            for rank, arguments in enumerate(whole):
                assert arguments.residual is not None
                one = slice(row, row + 1)
                part = arguments._replace(x=arguments.x[one], residual=arguments.residual[one])
                alone.append(ranks.call(rank, part))
            assert ranks.run() == 0
            for one_row, all_rows in zip(alone, together, strict=True):
                assert torch.equal(one_row.norm[0], all_rows.norm[row])
                assert torch.equal(one_row.norm, alone[0].norm)


def test_an_absent_rank_ends_the_wait_with_nan_and_an_error(three: Built) -> None:
    choice = random.Random(5)
    calls = [arguments_of(1, 3, 3, choice) for _ in range(2)]
    with three.ranks() as ranks:
        for workspace in ranks.workspaces:
            workspace.timeout_nanoseconds = 300_000  # the emulator's clock counts steps
        given = [[ranks.call(rank, own[rank]) for own in calls] for rank in (0, 2)]
        assert ranks.run() == 0
        for results in (result for own in given for result in own):
            assert all(bool(value.isnan().all()) for value in results)
        for rank in (0, 2):
            with pytest.raises(PeerTimeoutError, match="rank 1 did not come"):
                ranks.workspaces[rank].check()
        ranks.workspaces[1].check()


def test_two_calls_at_work_on_one_segment_are_an_error(three: Built) -> None:
    choice = random.Random(6)
    with three.ranks() as ranks:
        states = gpu_layout.layout(3).one_shot[2].state
        ranks.memories[0][states + 8] = 1  # as another launch would leave it while it runs
        for rank, arguments in enumerate(arguments_of(1, 2, 3, choice)):
            ranks.call(rank, arguments)
        assert ranks.run() == 0
        with pytest.raises(PeerTimeoutError, match="two calls overlapped"):
            ranks.workspaces[0].check()


#: Each breaks a rule of the protocol: what to replace, by what.
MUTANTS = {
    "no wipe": [("column < extent;", "column < 0;")],
    "wipe as wide as this use": [("column < extent;", "column < extent && column < width;")],
    "two slots": [
        ("slot == 0 ? 2 : slot - 1", "1 - slot"),
        ("slot == 2 ? 0 : slot + 1", "1 - slot"),
    ],
    "one word polled": [
        (
            "for (int k = 0; k < 4; ++k) {\n    if constexpr (X_DTYPE == kFloat32) {\n      found",
            "for (int k = 0; k < 1; ++k) {\n    if constexpr (X_DTYPE == kFloat32) {\n      found",
        )
    ],
    "inputs read before the wait": [("  wait_for_predecessor();\n", "")],
    "stride of the call's rows": [
        (
            "* p.segments + segment",
            "* static_cast<u32>(p.rows * p.row_segments) + segment",
        ),
        (
            "static_cast<u64>(p.segments) * kSegment",
            "static_cast<u64>(p.rows * p.row_segments) * kSegment",
        ),
    ],
    "negative zero sent": [("const Words v = without_empty(x[k]);", "const Words v = x[k];")],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_tests_see_what_breaks_the_protocol(name: str, tmp_path: Path) -> None:
    changed = set()

    def mutate(file: str, source: str) -> str:
        for old, new in MUTANTS[name]:
            if old in source:
                changed.add(old)
                source = source.replace(old, new)
        return source

    mutant = Built(tmp_path, 3, {"one-shot": 2}, mutate)
    assert changed == {old for old, _ in MUTANTS[name]}
    with mock.patch.object(Ranks, "most_steps", 5_000_000):
        assert any(mutant.failures(seed, 24) for seed in range(4))

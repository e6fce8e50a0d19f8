"""Calls on emulated ranks: forms of a site, random calls of them, and what is wrong with results."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from emulated_ranks import (
    Mutation,
    Ranks,
    build,
    build_mutants,
    emulated,
    small_ring,
    variant_for,
)
from op_support import BF16, FP16, FP32, ordered_bits

from fx_fusion.lowering import gpu_layout
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.reference import rank_order_reference

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


def calls_with_marks(form: int, size: int) -> list[Arguments]:
    """One call as each rank makes it, with what marks an empty place among its values."""
    own = arguments_of(form, 3, size, random.Random(8))
    marks = torch.tensor([-1, -2, -0x8000, 0x7FFF, -0x7F, 0], dtype=torch.int16)
    for rank, call in enumerate(own):
        bits = call.x.view(torch.int16)
        row = (rank + 1) % 3  # of two-shot: another rank's
        bits[row, 3 : 3 + 2 * len(marks)] = marks.repeat_interleave(2)
        bits[row, 32:48] = -1
        bits[2, rank::7] = -1
    return own


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
                most = max(TOKENS)
                if algorithm != "local":
                    room = gpu_layout.rows_per_launch(hidden, dtype.itemsize, size, algorithm)
                    most = min(most, room)
                for tokens in range(1, most + 1):
                    arguments = arguments_of(form, tokens, size, choice)[0]
                    if algorithm == "local":  # never writes what it is given
                        arguments = arguments._replace(want_reduced=False)
                    found.add(variant_for(arguments, algorithm))
    return sorted(found)


class Built:
    """An emulator for one world size and, of each algorithm, the first forms.

    Attributes:
        size: Ranks.
        forms: How many of the forms, by algorithm.
        library: The emulator.
        kernels: The number of each variant in the library.
    """

    def __init__(self, size: int, forms: Mapping[str, int]) -> None:
        self.size, self.forms = size, forms
        self.library: Any = None
        self.kernels: Mapping[Any, int] = {}

    def build(self, folder: Path) -> Built:
        """Compile all variants."""
        variants = all_variants(self.size, self.forms)
        self.library = build(folder, variants)
        self.kernels = {variant: number for number, variant in enumerate(variants)}
        return self

    def ranks(self, seed: int = 0) -> Any:
        """Emulated ranks with fresh workspaces, as a context."""
        return emulated(self.library, self.kernels, self.size, seed)

    def failures(self, seed: int, calls: int) -> list[str]:
        """What was wrong in so many mixed calls."""
        with self.ranks(seed) as ranks:
            return some_calls(ranks, calls, seed, self.forms)


def build_all(
    folder: Path, size: int, mutants: Mapping[Any, tuple[str, Mutation]]
) -> dict[Any, Built]:
    """Emulators of mutants by name, given as algorithm and mutation, for the first form."""
    found: dict[Any, Built] = {}
    given: list[tuple[Any, Mutation]] = []
    for name, (algorithm, mutate) in mutants.items():
        built = found[name] = Built(size, {algorithm: 1})
        (variant,) = all_variants(size, built.forms)
        built.kernels = {variant: len(given)}
        given.append((variant, mutate))
    library = build_mutants(folder, given)
    for built in found.values():
        built.library = library
    return found

"""Registers and spills of the GPU kernels' variants, as NVIDIA's assembler reports them.

Writes `registers.csv`, the table that is committed, in some minutes:

    python tests/lowering/gpu/kernel_registers.py
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from fx_fusion.lowering import gpu_build
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.gpu_loaded import has_programmatic_launch
from fx_fusion.lowering.gpu_variant import Variant, spread_of, variant_of
from fx_fusion.lowering.runtime_compiler import NVRTC

TABLE: Final = Path(__file__).with_name("registers.csv")
ARCHS: Final = ("sm_80", "sm_90", "sm_100")
WORLDS: Final = (2, 4, 8, 16)
HIDDEN: Final = (63, 2880, 4096, 5120, 7168, 8192, 16384)
#: Up to this hidden size no variant may spill.
NO_SPILLS_UP_TO: Final = 8192
#: float16 takes what bfloat16 does.
DTYPES: Final = (torch.bfloat16, torch.float32)
#: Few rows, which are spread over clusters, and many.
TOKENS: Final = (1, 512)
#: Of an H200; it only decides where few rows end.
MULTIPROCESSORS: Final = 132
#: "usual": residual and weight of x's dtype; "all": whatever takes registers.
OPTIONS: Final = ("usual", "all")


class Case(NamedTuple):
    """A variant and what it was chosen for."""

    algorithm: str
    arch: str
    world: int
    dtype: str
    options: str
    hidden: int
    variant: Variant


class Line(NamedTuple):
    """The most that one of several variants takes: a line of the table; bytes of a thread."""

    algorithm: str
    arch: str
    world: int
    dtype: str
    options: str
    hidden: str
    registers: int
    stack: int
    spilled: int


def cases(
    archs: tuple[str, ...] = ARCHS,
    worlds: tuple[int, ...] = WORLDS,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    hidden_sizes: tuple[int, ...] = HIDDEN,
) -> Iterator[Case]:
    """Every variant that these sizes lead to, each once."""
    seen = set()
    for algorithm, arch, world, dtype, options, hidden, tokens in itertools.product(
        gpu_build.KERNELS, archs, worlds, dtypes, OPTIONS, hidden_sizes, TOKENS
    ):
        if algorithm == "local" and world != worlds[0]:
            continue  # it knows of no ranks
        if algorithm == "two-shot" and world == 2:
            continue  # never taken
        variant = variant_for(algorithm, arch, world, dtype, options, hidden, tokens)
        name = str(dtype).removeprefix("torch.")
        ranks = 1 if algorithm == "local" else world
        case = Case(algorithm, arch, ranks, name, options, hidden, variant)
        key = (arch, variant, hidden <= NO_SPILLS_UP_TO)
        if key not in seen:
            seen.add(key)
            yield case


def variant_for(
    algorithm: str,
    arch: str,
    world: int,
    dtype: torch.dtype,
    options: str,
    hidden: int,
    tokens: int,
) -> Variant:
    """The variant of a call of that many tokens."""
    x = torch.empty(1, hidden, dtype=dtype)
    other = x if options == "usual" else x.float()
    arguments = Arguments(
        x,
        other,
        other[0],
        None if options == "usual" else other[0],
        1e-6,
        "",
        1 if algorithm == "local" else world,
        reciprocal="rsqrt" if options == "usual" else "sqrt",
        want_residual=True,
        want_reduced=options == "all" and algorithm != "local",
        want_rstd=options == "all",
    )
    clusters = has_programmatic_launch(arch)
    shape = spread_of(arguments, tokens, MULTIPROCESSORS, clusters, algorithm)
    return variant_of(arguments, shape, algorithm)


def lines(given: Iterator[Case]) -> list[Line]:
    """Compile the cases; one line for each kind of them."""
    most: dict[tuple[str, ...], list[int]] = {}
    for case in given:
        used = gpu_build.compile_variant(case.variant, case.arch).resources
        assert used is not None
        small = case.hidden <= NO_SPILLS_UP_TO
        hidden = f"<={NO_SPILLS_UP_TO}" if small else str(case.hidden)
        key = (case.algorithm, case.arch, str(case.world), case.dtype, case.options, hidden)
        known = most.get(key, [0, 0, 0])
        most[key] = [max(pair) for pair in zip(used, known, strict=True)]
    return [line_of([*key, *map(str, figures)]) for key, figures in most.items()]


def line_of(row: Sequence[str]) -> Line:
    """A line from its texts."""
    algorithm, arch, world, dtype, options, hidden, registers, stack, spilled = row
    return Line(
        *(algorithm, arch, int(world), dtype, options, hidden),
        *(int(registers), int(stack), int(spilled)),
    )


def recorded() -> tuple[str, list[Line]]:
    """The version of NVRTC that the committed table was made with, and its lines."""
    with TABLE.open(newline="") as file:
        version = file.readline().removeprefix("# NVRTC ").strip()
        reader = csv.reader(file)
        next(reader)
        return version, [line_of(row) for row in reader]


def write() -> None:
    """Compile everything and write the table."""
    found = lines(cases())
    with TABLE.open("w", newline="") as file:
        file.write(f"# NVRTC {NVRTC.version}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Line._fields)
        writer.writerows(found)


if __name__ == "__main__":
    write()

"""The GPU kernels' protocol under ThreadSanitizer: ranks and clusters of blocks are threads.

A block's GPU threads are fibers that the sanitizer tells apart, so that what is only shared within
a block is watched too. The test's teeth are shown by mutants that have to fail.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from emulated_ranks import HERE, write_variants

from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.lowering.gpu_layout import Geometry
from fx_fusion.lowering.gpu_variant import DTYPE_CODES, Variant, variant_of

FLAGS = ("-std=c++20", "-O1", "-g", "-ffp-contract=off", "-w", "-pthread", "-fsanitize=thread")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Algorithm, world size, dtype, blocks of a cluster, threads of a block, vectors of a thread,
#: whether rows are whole vectors. Blocks are small: each GPU thread is a context of its own.
CASES = (
    ("one-shot", 2, BF16, 1, 64, 1, True),
    ("one-shot", 2, FP32, 1, 32, 2, False),
    ("one-shot", 3, BF16, 2, 32, 1, True),
    ("two-shot", 3, BF16, 1, 64, 1, True),
    ("two-shot", 3, FP32, 2, 32, 1, False),
    ("one-shot", 4, FP16, 1, 32, 1, True),
    ("two-shot", 4, FP16, 1, 32, 2, True),
)
#: What breaks a rule of the protocol, if the harness is told the number. The first is a plain
#: store as push, in gpu_threads.h. The others: file, what is replaced, by what.
PLAIN_PUSH, NO_WIPE, NO_MEETING, NO_WIPE_OF_TWO_SHOT, ONE_SLOT = range(1, 6)
MUTANTS = {
    NO_WIPE: ("gpu_one_shot.cu", "wipe(p, slot", "if (!IS_IT) wipe(p, slot"),
    NO_MEETING: ("gpu_epilogue.h", "else block_meet();", "else if (!IS_IT) block_meet();"),
    NO_WIPE_OF_TWO_SHOT: ("gpu_two_shot.cu", "wipe(p, own,", "if (!IS_IT) wipe(p, own,"),
    ONE_SLOT: ("gpu_one_shot.cu", "slot[k] ^ 1u", "slot[k] ^ (IS_IT ? 0u : 1u)"),
}

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C++ compiler")


def variant(
    algorithm: str,
    world: int,
    dtype: torch.dtype,
    cluster: int,
    threads: int,
    vectors: int,
    aligned: bool,
) -> Variant:
    """A site with residual and weight of x's dtype, cast before the weight."""
    x = torch.empty(1, 64, dtype=dtype)
    arguments = Arguments(
        *(x, x, x[0], None, 1e-6, "", world),
        norm_dtype=dtype,
        want_residual=True,
        want_reduced=True,
    )
    made = variant_of(arguments, Geometry(cluster, threads, vectors, 1), algorithm)
    return made._replace(aligned=int(aligned))


def with_mutants(name: str, text: str) -> str:
    """A source in which each mutant is a choice at run time, so that one build serves all."""
    for number, (file, old, new) in MUTANTS.items():
        if name == file:
            assert old in text
            text = text.replace(old, new.replace("IS_IT", f"(threads::mutant == {number})"))
    return text


def build(folder: Path) -> Path:
    """The harness over the sources."""
    variants = [variant(*case) for case in CASES]
    write_variants(folder, variants, with_mutants)
    rows = [
        f"{{v{number}::entry, {int(one.algorithm == 'two-shot')}, {one.world}, {one.cluster},"
        f" {one.threads}, {one.vectors_per_thread}, {one.aligned}, {one.x_dtype}}},"
        for number, one in enumerate(variants)
    ]
    with (folder / "variants.inc").open("a") as file:
        file.write("\n".join(["", "static const Variant kVariants[] = {", *rows, "};"]))
    (folder / "gpu_emulator.h").write_text((HERE / "gpu_threads.h").read_text())
    target = folder / "threads_main"
    done = subprocess.run(
        [
            *(compiler(), *FLAGS, f"-I{folder}", f"-I{HERE}"),
            *(str(HERE / "threads_main.cpp"), "-o", str(target)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    if "cannot find" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("the compiler lacks the runtime of -fsanitize=thread")
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def run(
    harness: Path, world: int, calls: int, seed: int, mutant: int = 0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # address space layouts of some kernels don't suit ThreadSanitizer: fix it
        ["setarch", "-R", str(harness), *map(str, (world, calls, seed, mutant))],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("threads"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_schedule_races_or_gives_other_bits(harness: Path, world: int) -> None:
    done = run(harness, world, 20, world)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "ok\n"


@pytest.mark.parametrize(
    ("mutant", "world", "sign"),
    [
        (PLAIN_PUSH, 3, "data race"),
        (NO_WIPE, 3, "wrong in call"),
        (NO_MEETING, 3, "data race"),
        (NO_WIPE_OF_TWO_SHOT, 3, "wrong in call"),
        (ONE_SLOT, 2, "wrong in call"),
    ],
)
def test_what_breaks_the_protocol_is_found(
    harness: Path, mutant: int, world: int, sign: str
) -> None:
    done = run(harness, world, 24, 1, mutant)
    assert done.returncode != 0
    assert sign in done.stderr


def test_the_dtypes_have_the_numbers_that_the_harness_takes() -> None:
    assert DTYPE_CODES == {FP32: 0, FP16: 1, BF16: 2}

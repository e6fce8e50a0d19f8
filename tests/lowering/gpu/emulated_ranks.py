"""The GPU kernel's source and the code that launches it, on emulated ranks without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fx_fusion.lowering import (
    gpu_build,
    gpu_driver,
    gpu_kernel,
    gpu_layout,
    gpu_loaded,
    gpu_local,
)
from fx_fusion.lowering.arguments import Arguments, Results, empty_results
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.lowering.gpu_variant import Variant, spread_of, variant_of
from fx_fusion.lowering.gpu_workspace import GpuWorkspace, mark_empty

HERE = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-shared")
#: Multiprocessors that the launch code is told of; few, so that launches of a few rows differ.
MULTIPROCESSORS = 16
#: Clusters that fit at once; more rows than that make a cluster take several.
CLUSTERS_AT_ONCE = 2
#: Segments of one-shot's ring, and of two-shot's for each owner; a call with more is several
#: launches.
SEGMENTS = 8
OWNER_SEGMENTS = 2
#: From a source file's name and text to the text to compile.
Mutation = Callable[[str, str], str]


def variant_for(arguments: Arguments, algorithm: str = "one-shot") -> Variant:
    """The variant of a call that is one launch."""
    shape = spread_of(arguments, arguments.x.shape[0], MULTIPROCESSORS, True, algorithm)
    return variant_of(arguments, shape, algorithm)


def write_variants(
    folder: Path, variants: Sequence[Variant], mutate: Mutation | None = None
) -> None:
    """Write the kernels' sources, or mutants of them, and `variants.inc`.

    That includes the sources once for each variant, in the namespaces v0, v1, ..., each with a
    function `entry` that takes the address of the parameters.
    """
    write_sources(folder, mutate)
    lines = [
        line for number, variant in enumerate(variants) for line in lines_of(number, variant)
    ]
    (folder / "variants.inc").write_text("\n".join(lines))


def write_sources(folder: Path, mutate: Mutation | None = None) -> None:
    """Write the kernels' sources and headers, or mutants of them."""
    for name, text in gpu_build.sources().items():
        (folder / name).write_text(mutate(name, text) if mutate else text)


def lines_of(number: int, variant: Variant, folder: str = "") -> list[str]:
    """The lines of `variants.inc` for one variant of the sources in a folder, "mutant/"."""
    defined = variant.options()
    kernel = gpu_build.KERNELS[variant.algorithm]
    return [
        *(f"#define {name.upper()} {value}" for name, value in defined.items()),
        f"namespace v{number} {{",
        f'#include "{folder}{kernel.source}"',
        "void entry(const void* p) {",
        f"  {kernel.entry}(*static_cast<const Params*>(p));",
        "}",
        "}",
        *(f"#undef {name.upper()}" for name in defined),
    ]


def build(folder: Path, variants: Sequence[Variant]) -> ctypes.CDLL:
    """Compile the kernels' sources, once for each variant."""
    write_variants(folder, variants)
    return compile_variants(folder, len(variants))


def build_mutants(folder: Path, mutants: Sequence[tuple[Variant, Mutation]]) -> ctypes.CDLL:
    """Compile mutants of the kernels' sources, each for one variant, in one library."""
    write_sources(folder)
    lines = []
    for number, (variant, mutate) in enumerate(mutants):
        own = folder / f"mutant{number}"
        own.mkdir()
        write_sources(own, mutate)
        (own / "gpu_device.h").unlink()  # is read once, from the folder above
        lines += lines_of(number, variant, f"{own.name}/")
    (folder / "variants.inc").write_text("\n".join(lines))
    return compile_variants(folder, len(mutants))


def compile_variants(folder: Path, count: int) -> ctypes.CDLL:
    """The emulator with what `variants.inc` holds."""
    names = ", ".join(f"v{number}::entry" for number in range(count))
    with (folder / "variants.inc").open("a") as file:
        file.write(f"\nstatic void (*const kernels[])(const void*) = {{{names}}};\n")
    target = folder / "emulator.so"
    command = [compiler(), *FLAGS, f"-I{folder}", f"-I{HERE}"]
    done = subprocess.run(
        [*command, str(HERE / "emulator_main.cpp"), "-o", str(target)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    library = ctypes.CDLL(str(target))
    library.emulator_input.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.emulator_memory.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]
    library.emulator_run.argtypes = [ctypes.c_uint64]
    return library


@dataclass
class Group:
    """What the launch code asks of a process group."""

    my_rank: int
    ranks: int
    group_name: str = "emulated"

    def rank(self) -> int:
        return self.my_rank

    def size(self) -> int:
        return self.ranks


class Ranks:
    """Emulated ranks with a workspace each; calls are queued, then run together."""

    #: Steps of the emulator after which a run is given up.
    most_steps = 400_000_000

    def __init__(self, library: ctypes.CDLL, kernels: Mapping[Variant, int], size: int) -> None:
        self.library, self.kernels, self.size = library, kernels, size
        sizes = gpu_layout.layout(size)
        self.memories = [torch.empty(sizes.total, dtype=torch.uint8) for _ in range(size)]
        self.workspaces = []
        for rank, memory in enumerate(self.memories):
            mark_empty(memory, sizes)
            library.emulator_memory(rank, memory.data_ptr(), sizes.total)
            host = torch.zeros(17, dtype=torch.int32)
            workspace = GpuWorkspace(
                Group(rank, size),  # type: ignore[arg-type]
                torch.device("cpu"),
                arch="sm_90",
                multiprocessors=MULTIPROCESSORS,
                addresses=tuple(m.data_ptr() for m in self.memories),
                timeout_nanoseconds=1 << 40,
            )
            workspace._host = host
            workspace._host_words = (ctypes.c_int32 * 17).from_address(host.data_ptr())
            self.workspaces.append(workspace)
        self.kept: list[Any] = []

    def function(self, code: bytes, name: str, **shape: Any) -> Any:
        """Stands in for `gpu_driver.Function`; the stream's number is the rank."""
        number, library = int(code), self.library

        class Function:
            def clusters_at_once(self, multiprocessors: int) -> int:
                return CLUSTERS_AT_ONCE

            def device_clusters(self) -> int:
                return 1000

            def launch(self, clusters: int, stream: int, parameters: Any) -> None:
                size = gpu_loaded.CALL.size + gpu_loaded.HIDDEN.size
                size += gpu_loaded.WORKSPACE.size
                text = ctypes.string_at(parameters[0], size)
                library.emulator_launch(
                    stream, number, text, size, clusters, shape["cluster"], shape["threads"]
                )

        return Function()

    def machine_code(self, variant: Variant, arch: str) -> bytes:
        """Stands in for `gpu_build.machine_code`: the variant's number in the library."""
        return str(self.kernels[variant]).encode()

    def call(
        self,
        rank: int,
        arguments: Arguments,
        algorithm: str = "one-shot",
        in_place: bool = False,
    ) -> Results:
        """Queue a call of one rank. Its x and residual are NaN until its predecessor ended.

        With `in_place` the hidden state goes where the residual is.
        """

        def queue(late: Arguments) -> Results:
            results = empty_results(late)
            if in_place:
                assert late.residual is not None
                results = results._replace(residual=late.residual)
            workspace = self.workspaces[rank]
            return gpu_kernel.enqueue(late, workspace, rank, algorithm, results)

        return self._call(arguments, queue)

    def local_call(self, rank: int, arguments: Arguments, *, in_place: bool = False) -> Results:
        """Queue add and norm of one rank's `arguments.x`, taken as reduced already.

        With `in_place` the hidden state goes where the residual is.
        """
        machine = gpu_local.Machine("sm_90", MULTIPROCESSORS, ctypes.c_void_p())

        def queue(late: Arguments) -> Results:
            given = None
            if in_place:
                assert late.residual is not None
                given = empty_results(late)._replace(residual=late.residual)
            results = gpu_local.enqueue(late.x, late, machine, rank, given)
            assert given is None or results is None or results.norm is given.norm
            assert results is not None
            self.kept.append(machine)
            return results

        return self._call(arguments, queue)

    def _call(self, arguments: Arguments, queue: Callable[[Arguments], Results]) -> Results:
        late: dict[str, Any] = {}
        for name in ("x", "residual"):
            value = getattr(arguments, name)
            if value is not None:
                late[name] = torch.full_like(value, float("nan"))
                self.library.emulator_input(
                    late[name].data_ptr(),
                    value.data_ptr(),
                    value.numel() * value.element_size(),
                )
                self.kept += [value, late[name]]
        given = queue(arguments._replace(**late))
        self.kept.append((arguments, given))
        return given

    def run(self) -> int:
        """Run what was queued: 0 if it ended, 1 if it hung, 2 if it took too long."""
        status = int(self.library.emulator_run(self.most_steps))
        self.kept.clear()
        return status


@contextmanager
def emulated(
    library: ctypes.CDLL, kernels: Mapping[Variant, int], size: int, seed: int
) -> Iterator[Ranks]:
    """Ranks whose launches go to the emulator; `kernels` are the numbers of the variants."""
    library.emulator_reset(seed, size)
    with small_ring():
        ranks = Ranks(library, kernels, size)
        with (
            mock.patch.object(gpu_driver, "Function", ranks.function),
            mock.patch.object(gpu_build, "machine_code", ranks.machine_code),
        ):
            yield ranks


@contextmanager
def small_ring() -> Iterator[None]:
    """Rings of few segments, so that small calls stream through them in chunks."""

    def segments(world_size: int) -> int:
        return SEGMENTS

    def owner_segments(world_size: int) -> int:
        return OWNER_SEGMENTS if world_size > 2 else 0

    gpu_layout.layout.cache_clear()
    with (
        mock.patch.object(gpu_layout, "segments", segments),
        mock.patch.object(gpu_layout, "owner_segments", owner_segments),
    ):
        yield
    gpu_layout.layout.cache_clear()

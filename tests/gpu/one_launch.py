"""The kernels with all ranks in one launch of one process: blockIdx.y is the rank.

So a tool that runs one launch after the other can watch them: compute-sanitizer's memcheck,
racecheck, synccheck and initcheck. The launch code is the product's; what it would put into a rank's
stream is kept, and then launched for all ranks at once.

    PYTHONPATH=tests/lowering PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
        compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/one_launch.py

Prints "ok", or what was wrong; without caching each tensor is an allocation of its own, so that a
stray access is seen.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast
from unittest import mock

import torch
from gpu_support import FORMS, Differences, Form, arguments_of, expected_of, parts_of

from fx_fusion.lowering import gpu_build, gpu_driver, gpu_kernel, gpu_loaded
from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.gpu_layout import layout
from fx_fusion.lowering.gpu_variant import Variant
from fx_fusion.lowering.gpu_workspace import GpuWorkspace, mark_empty
from fx_fusion.lowering.runtime_compiler import NVRTC

ENTRY: Final = "one_launch"
#: Blocks of a rank at most: under a tool that adds code, fewer fit a multiprocessor.
BLOCKS: Final = 16
TIMEOUT_NANOSECONDS: Final = 120_000_000_000
PARAMETER_BYTES: Final = (
    gpu_loaded.CALL.size + gpu_loaded.HIDDEN.size + gpu_loaded.WORKSPACE.size
)
TOKENS: Final = (1, 2, 5, 9)


def harness(algorithm: str) -> str:
    """A source in which the kernel is a function, called with the parameters of its rank."""
    kernel = gpu_build.KERNELS[algorithm]
    return f"""
#include "gpu_device.h"
#undef KERNEL
#undef BOUNDS
#define KERNEL static __device__
#define BOUNDS(threads, blocks)
#include "{kernel.source}"
extern "C" __global__ void __launch_bounds__(THREADS) {ENTRY}(const Params* all) {{
  {kernel.entry}(all[blockIdx.y]);
}}
"""


def compiled(variant: Variant, arch: str) -> bytes:
    """Stands in for `gpu_build.machine_code`."""
    options = (*gpu_build.options_of(variant, arch), "-lineinfo")
    source = harness(variant.algorithm)
    return NVRTC.compile(source, "one_launch.cu", gpu_build.sources(), options).code


class Group(NamedTuple):
    """What the launch code asks of a process group."""

    my_rank: int
    ranks: int
    group_name: str = "one launch"

    def rank(self) -> int:
        return self.my_rank

    def size(self) -> int:
        return self.ranks


class Queued(NamedTuple):
    """A launch of one rank: which function, of how many clusters, with what parameters."""

    function: Any
    clusters: int
    parameters: bytes


class OneLaunch:
    """All ranks of a group on the current GPU, in this process."""

    def __init__(self, world_size: int) -> None:
        """Make their workspaces."""
        self.world_size = world_size
        self.queues: list[list[Queued]] = [[] for _ in range(world_size)]
        self._function = gpu_driver.Function
        self._kept: list[torch.Tensor] = []
        device = torch.device("cuda", torch.cuda.current_device())
        sizes = layout(world_size)
        memories = [
            torch.empty(sizes.total, dtype=torch.uint8, device=device)
            for _ in range(world_size)
        ]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.workspaces = []
        for rank, memory in enumerate(memories):
            mark_empty(memory, sizes)
            host = torch.zeros(17, dtype=torch.int32, pin_memory=True)
            workspace = GpuWorkspace(
                cast(Any, Group(rank, world_size)),
                device,
                arch=device_arch(device),
                multiprocessors=processors // world_size,
                sharers=world_size,
                block_limit=BLOCKS,
                addresses=tuple(one.data_ptr() for one in memories),
                timeout_nanoseconds=TIMEOUT_NANOSECONDS,
            )
            workspace._memory, workspace._host = memory, host
            workspace._host_words = (ctypes.c_int32 * 17).from_address(host.data_ptr())
            self.workspaces.append(workspace)
        torch.cuda.synchronize()
        self._context = gpu_driver.current_context()

    def function(self, code: bytes, name: str, **given: Any) -> Any:
        """Stands in for `gpu_driver.Function`; the stream's number is the rank."""
        given.update(programmatic=False, context=self._context)
        real = self._function(code, ENTRY, **given)
        real._config.grid_y = self.world_size

        class Recorder:
            clusters_at_once = real.clusters_at_once
            device_clusters = real.device_clusters

            @staticmethod
            def launch(clusters: int, stream: int, parameters: Any) -> None:
                text = ctypes.string_at(parameters[0], PARAMETER_BYTES)
                self.queues[stream].append(Queued(real, clusters, text))

        return Recorder()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The launch code's driver and compiler are ours."""
        with (
            mock.patch.object(gpu_driver, "Function", self.function),
            mock.patch.object(gpu_build, "machine_code", compiled),
        ):
            yield

    def call(self, calls: list[Arguments], algorithm: str) -> list[Results]:
        """One call of every rank."""
        results = [
            gpu_kernel.enqueue(arguments, self.workspaces[rank], rank, algorithm)
            for rank, arguments in enumerate(calls)
        ]
        for together in zip(*self.queues, strict=True):
            first = together[0]
            assert {one.clusters for one in together} == {first.clusters}
            text = bytearray(b"".join(one.parameters for one in together))
            parameters = torch.frombuffer(text, dtype=torch.uint8).cuda()
            self._kept.append(parameters)
            pointer = ctypes.c_uint64(parameters.data_ptr())
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
            stream = torch.cuda.current_stream().cuda_stream
            first.function.launch(first.clusters, stream, pointers)
        for queue in self.queues:
            queue.clear()
        return results


def mixed_calls(
    world_size: int, calls: int, seed: int, algorithms: tuple[str, ...], forms: list[Form]
) -> list[str]:
    """Calls of mixed tokens, forms and algorithms; returns what was wrong."""
    ranks, choice, differences = OneLaunch(world_size), random.Random(seed), Differences()
    with ranks.patched():
        for number in range(calls):
            form, tokens = choice.choice(forms), choice.choice(TOKENS)
            algorithm = choice.choice(algorithms)
            parts = parts_of(form, tokens, seed + number, world_size)
            own = [
                arguments_of(form, x, seed + number, world_size, "one launch") for x in parts
            ]
            expected = expected_of(parts, own[0])
            given = ranks.call(own, algorithm)
            torch.cuda.synchronize()
            for rank, results in enumerate(given):
                name = f"call {number}, rank {rank}, {algorithm}, {tokens} tokens, {form}"
                differences.compare(name, results, own[rank], expected)
    for workspace in ranks.workspaces:
        workspace.check()
    return differences.lines()


def algorithms_for(world_size: int) -> tuple[str, ...]:
    """Those that exchange something among so many ranks."""
    named = ("one-shot", "two-shot") if world_size > 2 else ("one-shot",)
    return tuple(name for name in named if name in gpu_build.KERNELS)


def main() -> str:
    """Run the calls that the command line asks for; returns what was wrong, "" if nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=8192, help="the most elements of a row")
    chosen = parser.parse_args()
    forms = [form for form in FORMS if form.hidden <= chosen.hidden]
    wrong = []
    for world_size in chosen.worlds:
        algorithms = algorithms_for(world_size)
        wrong += mixed_calls(world_size, chosen.calls, world_size, algorithms, forms)
    return "\n".join(wrong)


if __name__ == "__main__":
    failed = main()
    sys.stdout.write(f"{failed or 'ok'}\n")
    sys.exit(failed != "")

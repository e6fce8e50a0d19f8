"""Add and norm of a tensor that is reduced already, as one launch of our own on a GPU.

What the unfused path runs after the group's own all_reduce. It equals the eager lines of
`unfused.py`: the hidden state bit by bit, the norm within one ulp (another order of adding up the
squares). It needs no workspace and meets no other rank, so whether a rank can run it is that
rank's own matter.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from fx_fusion.lowering import gpu_kernel
from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.arguments import Arguments, Results, empty_results, is_aligned
from fx_fusion.lowering.driver import driver_for
from fx_fusion.lowering.gpu_driver import DriverError
from fx_fusion.lowering.gpu_layout import Geometry
from fx_fusion.lowering.gpu_loaded import Loaded, has_programmatic_launch
from fx_fusion.lowering.gpu_select import gpu_takes_local
from fx_fusion.lowering.gpu_variant import Variant, spread_of, variant_of
from fx_fusion.lowering.runtime_compiler import BuildError
from fx_fusion.lowering.select import kernel_of

log = logging.getLogger(__name__)

#: Clusters of a launch at most; each takes the rows that are so many apart.
_MOST_CLUSTERS: Final = 1 << 20


@dataclass
class Machine:
    """A GPU as seen by this process, and the variants loaded on it.

    Attributes:
        arch: "sm_90".
        multiprocessors: Of the GPU.
        context: The CUDA context that kernels are loaded into.
        lock: Held while a launch's parameters are written and used.
        launchers: The variants in use; None for one that can't be had.
    """

    arch: str
    multiprocessors: int
    context: ctypes.c_void_p
    lock: threading.Lock = field(default_factory=threading.Lock)
    launchers: dict[Any, LocalLauncher | None] = field(default_factory=dict)


class LocalLauncher(Loaded):
    """One variant for one hidden size on one GPU, ready to launch."""

    capacity = _MOST_CLUSTERS

    def __init__(self, arguments: Arguments, shape: Geometry, machine: Machine) -> None:
        """Compile or fetch the variant, and load it; the errors are those of `Loaded`."""
        super().__init__(arguments, shape, "local", machine.arch, machine.context)


def run(
    reduced: torch.Tensor, arguments: Arguments, results: Results | None = None
) -> Results | None:
    """Add and normalise; None where the kernel can't, so that torch's own have to.

    Args:
        reduced: The sum over ranks on a GPU, contiguous, not empty, of x's shape and dtype.
        arguments: The op's; its `x` isn't looked at.
        results: Where to write, contiguous, the residual's memory among it if need be, None
            for what isn't wanted; None for new tensors, which are made too where one of these
            isn't aligned.

    Returns:
        Contiguous tensors; `reduced` itself where it is wanted.
    """
    index = reduced.device.index
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return run(reduced, arguments, results)
    machine = _machine_for(reduced, arguments)
    if machine is None:
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return enqueue(reduced, arguments, machine, stream, results)


def enqueue(
    reduced: torch.Tensor,
    arguments: Arguments,
    machine: Machine,
    stream: int,
    results: Results | None = None,
) -> Results | None:
    """Put one call into the stream; None where the variant can't be had."""
    local = arguments._replace(x=reduced, want_reduced=False)
    rows = reduced.numel() // reduced.shape[-1]
    with machine.lock:
        launcher = launcher_for(local, rows, machine)
        if launcher is None:
            return None
        if results is None or not all(map(is_aligned, results)):
            results = empty_results(local)
        # The scale is taken in fp32, as the eager lines of the unfused path do.
        made = gpu_kernel.submit(local, [(launcher, 0, rows)], stream, torch.float32, results)
    return made._replace(reduced=reduced) if arguments.want_reduced else made


def launches(
    reduced: torch.Tensor, arguments: Arguments
) -> list[tuple[LocalLauncher, int, int]] | None:
    """The launches that `run` makes: variant, first row, rows; None where it makes none."""
    machine = _machine_for(reduced, arguments)
    if machine is None:
        return None
    rows = reduced.numel() // reduced.shape[-1]
    with machine.lock:
        launcher = launcher_for(
            arguments._replace(x=reduced, want_reduced=False), rows, machine
        )
    return None if launcher is None else [(launcher, 0, rows)]


def _machine_for(reduced: torch.Tensor, arguments: Arguments) -> Machine | None:
    """The GPU of a call that the kernel takes; None where torch's own kernels have to.

    It is the current device, whose context `machine_of` keeps.
    """
    arch = device_arch(reduced.device)
    if not gpu_takes_local(kernel_of(arguments.plan), arch, reduced.shape[-1]):
        return None
    return machine_of(reduced.device.index)


def _spread(arguments: Arguments, rows: int, machine: Machine) -> Geometry:
    clusters = has_programmatic_launch(machine.arch)
    return spread_of(arguments, rows, machine.multiprocessors, clusters, "local")


def variant_for(arguments: Arguments, rows: int, machine: Machine) -> Variant:
    """What a call of so many rows runs."""
    return variant_of(arguments, _spread(arguments, rows, machine), "local")


def launcher_for(arguments: Arguments, rows: int, machine: Machine) -> LocalLauncher | None:
    """The variant of a call of so many rows, loaded; None, with a WARNING, if it can't be."""
    shape = _spread(arguments, rows, machine)
    key = (shape, *gpu_kernel.variant_key(arguments))
    if key not in machine.launchers:
        try:
            machine.launchers[key] = LocalLauncher(arguments, shape, machine)
        except (BuildError, DriverError) as error:
            machine.launchers[key] = None
            log.warning("fx_fusion: add and norm run on torch's own kernels: %s", error)
    return machine.launchers[key]


@functools.cache
def machine_of(index: int) -> Machine | None:
    """The GPU of this index; None, with a WARNING, where its driver can't be used.

    Legal while a graph is captured: it only looks. A thread that has just worked on the GPU has
    its context.
    """
    properties = torch.cuda.get_device_properties(index)
    arch = device_arch(torch.device("cuda", index))
    try:
        context = driver_for(arch).current_context()
    except DriverError as error:
        log.warning("fx_fusion: add and norm run on torch's own kernels: %s", error)
        return None
    return Machine(arch, properties.multi_processor_count, context)

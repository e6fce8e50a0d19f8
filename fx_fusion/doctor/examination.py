"""All checks, in the order in which they are shown."""

from __future__ import annotations

from fx_fusion.doctor import compilers, devices, host, installation, ranks, versions
from fx_fusion.doctor.check import Check, run_checks

CHECKS = (
    versions.python_and_fx_fusion,
    versions.torch_and_triton,
    versions.other_libraries,
    installation.entry_point,
    installation.switched_off,
    compilers.host_compiler,
    compilers.cpu_kernel,
    compilers.nvrtc,
    compilers.kernel_cache,
    host.shared_memory,
    host.cores,
    devices.gpus,
    devices.peer_access,
    devices.links,
    devices.symmetric_memory,
    installation.chosen_kernel,
)


def examine() -> list[Check]:
    """What this process finds by itself."""
    return run_checks(CHECKS)


def examine_ranks(timeout: float) -> tuple[int, list[Check]]:
    """What all ranks find; collective. Call `ranks.leave` once it has been shown.

    Args:
        timeout: Seconds each wait for the other ranks may take.

    Returns:
        This rank and the checks of all of them, the same on every rank; where they didn't meet,
        this rank's own and a failed check that says so.
    """
    # compiling, in the ranks' own time, comes before they wait for each other
    own = [*run_checks((ranks.host,)), *examine()]
    rank, cause = ranks.join(timeout)
    if cause:
        return rank, [*own, ranks.not_met(cause, timeout)]
    try:
        by_rank = ranks.gather(own)
        more = ranks.together(by_rank)
        if more:
            by_rank = ranks.gather([*own, *more])
    except RuntimeError as error:
        return rank, [*own, ranks.not_met(str(error), timeout)]
    return rank, ranks.merged(by_rank)

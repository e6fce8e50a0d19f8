"""Functions for `spawn` to run, good and bad; at the top level, as spawn needs them."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading

import torch
import torch.distributed as dist


def rank_and_sum(
    rank: int, world_size: int, tensor: torch.Tensor
) -> tuple[int, int, torch.Tensor]:
    tensor = tensor + rank
    dist.all_reduce(tensor)
    return rank, world_size, tensor


def facts(rank: int, world_size: int) -> tuple[str, int, int, str]:
    ip_port_store = os.environ.get("MASTER_ADDR", "")
    return dist.get_backend(), torch.get_num_threads(), dist.get_rank(), ip_port_store


def large_result(rank: int, world_size: int) -> bytes:
    return bytes([rank]) * (1 << 22)


def rank_one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the one that failed")
    dist.barrier()


def rank_one_exits(rank: int, world_size: int) -> int:
    if rank == 1:
        os._exit(7)
    return rank


def waits_for_ever(rank: int, world_size: int) -> None:
    if rank == 1:  # can't be looked at, as in a long call of the system
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Event().wait()


def rank_one_skips_the_collective(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


def returns_a_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


def starts_a_process(rank: int, world_size: int) -> tuple[int, int]:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    return os.getpid(), child.pid


def leaves_without_its_group(rank: int, world_size: int) -> int:
    dist.destroy_process_group()
    return rank

"""Run a function in real processes that form a group; every wait is bounded.

The parent (`spawn`) and the child (`_child`) talk through files in a temporary directory, so
that nothing the parent does can block on a child, and through one pipe each, which the child
uses to say "my report is written" and the parent to say "all are done, leave". Ranks stay
until all have reported: a rank that left early would close connections others still read.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fx_fusion.errors import SpawnError

#: Seconds the other ranks get to end by themselves once one of them has failed.
_GRACE: Final = 5.0
#: The share of the time left at the start after which a collective gives up, so that a rank
#: that waits for a lost peer can still report where it waited.
_COLLECTIVE_SHARE: Final = 0.7


@dataclass
class _Rank:
    """The parent's view of one child."""

    process: SpawnProcess
    pipe: Connection
    directory: Path
    reported: bool = False

    @property
    def exited(self) -> bool:
        """Whether the process has ended; leaves it unreaped, so its id stays taken."""
        return bool(wait([self.process.sentinel], timeout=0))

    def kill(self) -> None:
        """End the process and everything it started."""
        pid = self.process.pid
        if pid is None:
            return
        # The child leads a session of its own once it runs; before that only it exists.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(timeout=_GRACE)


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *,
    device: str = "cpu",
    timeout: float = 60.0,
    args: tuple[Any, ...] = (),
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` processes that form one group.

    The default process group exists when `fn` starts: gloo for the CPU; for "cuda" NCCL where
    each rank has a GPU of its own, else gloo with the ranks sharing GPUs (rank r gets
    cuda:(r % GPUs) as its current device). The processes meet through a file, so no port is
    used. No process outlives the call.

    Args:
        fn: A function at the top level of a module that can be imported.
        world_size: Number of processes.
        device: "cpu" or "cuda" (which is HIP's name in torch as well).
        timeout: Seconds for everything, the start of the processes included. A collective
            gives up earlier, so that the report can say which one.
        args: Passed on to `fn`; must be picklable.

    Returns:
        What `fn` returned on each rank, in rank order; must be picklable.

    Raises:
        SpawnError: A rank raised, died, or did not finish in time. The message holds the
            traceback of each rank that raised and the stack of each rank that was stopped.
    """
    _check(fn, world_size, device, timeout)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="fx_fusion_spawn_") as name:
        directory = Path(name)
        job = _pickled_job(fn, args)
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                ranks.append(_start(number, world_size, device, deadline, job, directory))
            first_failure = _wait_for_reports(ranks, deadline)
            _dump_stacks([rank for rank in ranks if not rank.reported])
            errors = _errors(ranks, timeout, first_failure)
            results = [] if errors else [_result(rank) for rank in ranks]
            for rank in ranks:
                with suppress(OSError):
                    rank.pipe.send_bytes(b"leave")
            wait_until = min(deadline, time.monotonic() + _GRACE)
            _wait_for_exits(ranks, wait_until if not errors else time.monotonic())
        finally:
            for started in ranks:
                started.kill()
                started.pipe.close()
    if errors:
        raise SpawnError(
            f"{fn.__qualname__} on {world_size} ranks ({device}): {len(errors)} of them failed."
            "\n\n" + "\n\n".join(errors)
        )
    return results


def _check(fn: Callable[..., Any], world_size: int, device: str, timeout: float) -> None:
    if world_size < 1:
        raise SpawnError(f"spawn(world_size={world_size}): at least 1 rank is needed.")
    if timeout <= 0:
        raise SpawnError(f"spawn(timeout={timeout}): give a positive number of seconds.")
    if device not in ("cpu", "cuda"):
        raise SpawnError(f"spawn(device={device!r}): choose 'cpu' or 'cuda'.")
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise SpawnError("spawn(device='cuda'): torch sees no GPU here; use device='cpu'.")
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise SpawnError(
            f"spawn({fn.__qualname__}): other processes import the function by name, so it"
            " must stand at the top level of a module."
        )


def _pickled_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """`fn` and `args` as bytes; plain pickle, which copies tensors rather than sharing them."""
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise SpawnError(f"spawn({fn.__qualname__}): cannot pickle its arguments.") from error


def _start(
    rank: int, world_size: int, device: str, deadline: float, job: bytes, directory: Path
) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    own = directory / f"rank{rank}"
    own.mkdir()
    process = context.Process(
        target=_child,
        args=(rank, world_size, device, deadline, job, str(directory), theirs),
        name=f"rank {rank}",
    )
    process.start()
    theirs.close()
    return _Rank(process, ours, own)


def _wait_for_reports(ranks: list[_Rank], deadline: float) -> float | None:
    """Wait until every rank has reported or ended; after a failure only a little longer.

    Returns:
        When the first failure was seen, or None.
    """
    failed_at: float | None = None
    while True:
        for rank in ranks:
            if not rank.reported:
                rank.reported = (rank.directory / "report").exists()
            lost = rank.exited and not rank.reported
            if failed_at is None and (lost or (rank.directory / "traceback").exists()):
                failed_at = time.monotonic()
                deadline = min(deadline, failed_at + _GRACE)
        pending = [rank for rank in ranks if not rank.reported and not rank.exited]
        left = deadline - time.monotonic()
        if not pending or left <= 0:
            return failed_at
        ready = wait([*(r.pipe for r in pending), *(r.process.sentinel for r in pending)], left)
        for rank in pending:
            if rank.pipe in ready:
                # One short message, sent after the report was moved into place; the end of
                # the pipe means that the process is about to be seen as ended.
                with suppress(EOFError, OSError):
                    rank.pipe.recv_bytes()


def _wait_for_exits(ranks: list[_Rank], deadline: float) -> None:
    pending = [rank for rank in ranks if not rank.exited]
    while pending and time.monotonic() < deadline:
        wait([r.process.sentinel for r in pending], max(0.0, deadline - time.monotonic()))
        pending = [rank for rank in pending if not rank.exited]


def _dump_stacks(ranks: list[_Rank]) -> None:
    """Ask the ranks that are still at work for their stacks, and wait a moment for them."""
    for rank in ranks:
        if rank.process.pid is not None and not rank.exited:
            os.kill(rank.process.pid, signal.SIGUSR1)
    until = time.monotonic() + 1.0
    sizes: dict[Path, int] = {}
    for rank in ranks:
        path = rank.directory / "stack"
        while path.exists() and time.monotonic() < until:
            size = path.stat().st_size
            if size and sizes.get(path) == size:
                break
            sizes[path] = size
            time.sleep(0.05)


def _errors(ranks: list[_Rank], timeout: float, failed_at: float | None) -> list[str]:
    """One paragraph for each rank that did not return."""
    errors = []
    for number, rank in enumerate(ranks):
        failure = rank.directory / "traceback"
        if failure.exists():
            errors.append(f"rank {number} raised:\n{failure.read_text().rstrip()}")
        elif rank.reported:
            continue
        elif rank.exited:
            rank.process.join(timeout=_GRACE)
            errors.append(f"rank {number} {_ending(rank.process.exitcode)}")
        else:
            why = f"did not finish within {timeout:g} s"
            if failed_at is not None:
                why = "did not finish, and was stopped soon after the first failure"
            stack = rank.directory / "stack"
            text = stack.read_text().rstrip() if stack.exists() else ""
            if text:
                where = f"; it was at:\n{text}"
            elif (rank.directory / "started").exists():
                where = "; where it was couldn't be seen, as in a long call of the system."
            else:
                where = ", before its function started."
            errors.append(f"rank {number} {why}{where}")
    return errors


def _ending(exit_code: int | None) -> str:
    """How a process that left no report ended, in words."""
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name} and left no report."
    # Exit code 1 is also what multiprocessing gives for a script without the guard.
    hint = (
        ' (a script that calls spawn needs `if __name__ == "__main__":` around it)'
        if exit_code == 1
        else ""
    )
    return f"ended with exit code {exit_code} and left no report{hint}."


def _result(rank: _Rank) -> Any:
    return pickle.loads((rank.directory / "report").read_bytes())


def _child(
    rank: int,
    world_size: int,
    device: str,
    deadline: float,
    job: bytes,
    directory: str,
    pipe: Connection,
) -> None:
    """The child's side: set up, call, write the report, wait for leave."""
    # A session of its own lets the parent end this process with all that it starts.
    os.setsid()
    own = Path(directory) / f"rank{rank}"
    _end_with_parent(deadline)
    # Unbuffered and kept open: the handler writes to the descriptor.
    stack = (own / "stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        _join_group(rank, world_size, device, deadline, Path(directory))
        fn, args = pickle.loads(job)
        (own / "started").touch()
        report = pickle.dumps(fn(rank, world_size, *args))
    except BaseException:
        _write(own / "traceback", traceback.format_exc().encode())
        # No clean-up: it could wait for the very peers that failed.
        os._exit(1)
    _write(own / "report", report)
    pipe.send_bytes(b"reported")
    pipe.poll(max(0.0, deadline - time.monotonic()) + _GRACE)
    if dist.is_initialized():
        dist.destroy_process_group()


def _write(path: Path, data: bytes) -> None:
    """Write whole: the file appears under its name only when complete."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)


def _end_with_parent(deadline: float) -> None:
    """End this process when its parent is gone, or when its time has been up for a while."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel], max(0.0, deadline - time.monotonic()) + 2 * _GRACE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="fx_fusion spawn watch").start()


def _join_group(
    rank: int, world_size: int, device: str, deadline: float, directory: Path
) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        if gpus >= world_size:
            backend = "cpu:gloo,cuda:nccl"
        else:
            # NCCL refuses two ranks on one GPU; symmetric memory allows it when told to.
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    if sys.platform == "linux":
        # All ranks are on this host; don't depend on how its name resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torch leaves it untyped.
    store = cast(Any, dist).FileStore(str(directory / "store"), world_size)
    # The clock is the machine's, so the parent's deadline means the same here.
    timeout = timedelta(seconds=max(1.0, _COLLECTIVE_SHARE * (deadline - time.monotonic())))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    # Start together: a rank that ends or fails at once would break off connections that the
    # others are still making. Through the store, so that no connection has traffic of it.
    if store.add("joined", 1) == world_size:
        store.set("all joined", "yes")
    store.wait(["all joined"], timeout)

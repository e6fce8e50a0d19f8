"""The kernels benchmark's measuring loop on CPU ranks, with stand-ins for CUDA graphs."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fx_fusion.bench import kernel_graphs, kernel_times
from fx_fusion.bench.kernel_times import Job, Measured, rank_job


class Graph:
    """A graph that was run when it was captured, and does nothing when replayed."""

    def replay(self) -> None:
        pass


class Event:
    def __init__(self, **_: Any) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.seconds - self.seconds) * 1000


@contextlib.contextmanager
def captured(_: Graph) -> Iterator[None]:
    yield


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any) -> Any:
        return make(*args[:-1], "cpu")

    return made


def job(rank: int, world_size: int, given: Job) -> list[Measured]:
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph, cuda.Event = Graph, captured, Event
    cuda.synchronize = lambda *_: None
    cuda.device_count = lambda: 1
    times: Any = kernel_times
    prepared = itertools.count()
    times.prepare = lambda *_: next(prepared) < 2  # not at the third size
    times.make_inputs = on_cpu(kernel_graphs.make_inputs)
    times.Meter.compile_norms = lambda _: None  # it allocates on the GPU
    if "raise on rank 1" in given.causes and rank == 1:
        capture, calls = times.capture, itertools.count()

        def raises_once(*args: Any) -> Any:
            made = capture(
                *args
            )  # what runs here would not in a capture; the peer waits for it
            if next(calls) == 1:
                raise ValueError("no\nmore")
            return made

        times.capture = raises_once
    return rank_job(rank, world_size, given)

"""Run what makes GPU memory or meets other ranks in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_own_thread(call: Callable[[], Result]) -> Result:
    """The result of `call`, run in a new thread; what it raises is raised here.

    Memory pools of CUDA graphs are routed to by thread, so what it allocates lies outside of
    them. The thread starts with torch's default device: `call` chooses its own.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="fx_fusion") as thread:
        return thread.submit(call).result()

"""torch's caches of compiled graphs, switched off where a test needs the pass to run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def compile_every_graph_again() -> None:
    """Take no compiled graph from a cache, else the pass may not run; C++ is still compiled once."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False


@contextlib.contextmanager
def caches_left_alone() -> Iterator[None]:
    """The switches are afterwards what they are now, for tests in pytest's own process."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    before = inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache
    try:
        yield
    finally:
        inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache = before

"""torch's caches of compiled graphs, switched off where a test needs the pass to run."""

from __future__ import annotations


def compile_every_graph_again() -> None:
    """Take no compiled graph from a cache, else the pass may not run; C++ is still compiled once."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False

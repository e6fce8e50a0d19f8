"""Help for tests of tensor-parallel code: process groups without hardware, real processes.

* `fake_group(world_size)`: a process group that needs no other process, for looking at graphs.
* `graph_snapshot(fn, *args)`: the graphs of a call as stable text, for snapshot tests.
* `spawn(fn, world_size)`: real processes with a real group, every wait bounded.
"""

from __future__ import annotations

from fx_fusion.testing.groups import fake_group
from fx_fusion.testing.processes import spawn
from fx_fusion.testing.snapshot import graph_snapshot

__all__ = ["fake_group", "graph_snapshot", "spawn"]

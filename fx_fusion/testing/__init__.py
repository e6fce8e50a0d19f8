"""Help for tests of tensor-parallel code: process groups without hardware, real processes.

* `fake_group(world_size)`: a process group that needs no other process, for looking at graphs.
* `spawn(fn, world_size)`: real processes with a real group, every wait bounded.
"""

from __future__ import annotations

from fx_fusion.testing.groups import fake_group
from fx_fusion.testing.processes import spawn

__all__ = ["fake_group", "spawn"]

"""Find, judge, rewrite: the graph pass. Knows graphs, never hardware.

    graph --find_norms, find_sites--> Site --judge--> Decision --rewrite--> graph with fused op

`pipeline` strings them together as the custom pass that Inductor calls.
"""

from __future__ import annotations

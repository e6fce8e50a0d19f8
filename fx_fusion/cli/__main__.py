"""`python -m fx_fusion.cli` is the same as `fx-fusion`."""

from __future__ import annotations

from fx_fusion.cli import main

main()

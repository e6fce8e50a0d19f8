"""Benchmarks that come with the package: `python -m fx_fusion.bench.kernels`."""

from __future__ import annotations

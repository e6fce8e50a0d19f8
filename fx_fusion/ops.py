"""Registers the package's ops with torch: importing this module is all it takes.

Import it before loading anything compiled earlier that holds the op, such as an exported or
ahead-of-time compiled model; `torch.compile(backend="fx_fusion")` does so itself.
"""

from __future__ import annotations

from fx_fusion.lowering.ops import all_reduce_add_rms_norm

__all__ = ["all_reduce_add_rms_norm"]

"""The fused op and what runs behind it. Knows hardware and numerics, never graphs."""

from __future__ import annotations

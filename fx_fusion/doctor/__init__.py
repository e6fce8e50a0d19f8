"""The checks behind `fx-fusion doctor`: what of this machine and these ranks stands in the way.

Each module holds one group of checks, functions without arguments that return `Check`s. None
raises and none prints.
"""

from __future__ import annotations

"""Fuses all_reduce + residual add + RMSNorm in models compiled with torch.compile.

    model = torch.compile(model, backend="fx_fusion")
    model = torch.compile(model, options=fx_fusion.inductor_options())

    @fx_fusion.compile(dynamic=True)
    def forward(self, x, residual): ...

    print(fx_fusion.explain(model)(x))     # what would fuse, and why the rest would not
    fx_fusion.reports()                    # what became of everything compiled so far

Importing this package imports no torch: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fx_fusion.compiled import clear_reports, reports
    from fx_fusion.decorator import compile
    from fx_fusion.errors import FxFusionError
    from fx_fusion.explain import explain
    from fx_fusion.inductor_options import inductor_options
    from fx_fusion.lowering.workspace import prepare
    from fx_fusion.passes.registry import register_all_reduce, register_rms_norm
    from fx_fusion.report import FusionReport, GraphReport, Reason, SiteReport
    from fx_fusion.settings import FusionSettings, Target
    from fx_fusion.switch import disable

__version__ = "0.1.0"

__all__ = [
    "FusionReport",
    "FusionSettings",
    "FxFusionError",
    "GraphReport",
    "Reason",
    "SiteReport",
    "Target",
    "__version__",
    "clear_reports",
    "compile",
    "disable",
    "explain",
    "inductor_options",
    "prepare",
    "register_all_reduce",
    "register_rms_norm",
    "reports",
]

#: Where each public name lives.
_HOMES: Final = {
    "FusionReport": "report",
    "FusionSettings": "settings",
    "FxFusionError": "errors",
    "GraphReport": "report",
    "Reason": "report",
    "SiteReport": "report",
    "Target": "settings",
    "clear_reports": "compiled",
    "compile": "decorator",
    "disable": "switch",
    "explain": "explain",
    "inductor_options": "inductor_options",
    "prepare": "lowering.workspace",
    "register_all_reduce": "passes.registry",
    "register_rms_norm": "passes.registry",
    "reports": "compiled",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `fx_fusion.explain` the function when its module of that name is imported.

    The import system sets a submodule as an attribute of its package, where two of ours would
    hide the public function they hold.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in _HOMES):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

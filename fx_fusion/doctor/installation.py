"""How fx_fusion itself is set up: its entry point, its switch, and the kernel it would choose."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Final

import torch

from fx_fusion import compat, switch
from fx_fusion.doctor.check import Check, count_in_environment
from fx_fusion.errors import SettingError
from fx_fusion.lowering import toolchain
from fx_fusion.lowering.select import UNFUSED, Plan, Problem, select
from fx_fusion.settings import FusionSettings

_GROUP: Final = "torch_dynamo_backends"
_HIDDEN_SIZE: Final = 4096


def entry_point() -> list[Check]:
    """Whether `torch.compile(model, backend="fx_fusion")` finds this package by itself."""
    found = importlib.metadata.entry_points(group=_GROUP, name="fx_fusion")
    remedy = "Install the package, also to work on it: pip install -e . in its folder."
    if not found:
        text = f'not among {_GROUP}: backend="fx_fusion" isn\'t found'
        return [Check("entry point", "fail", text, remedy, shared="none")]
    point = next(iter(found))
    try:
        point.load()
    except Exception as error:  # whatever a broken installation raises
        text = f"{point.value} can't be loaded: {error}"
        return [Check("entry point", "fail", text, remedy, shared="broken")]
    if len(found) > 1:
        text = f"{len(found)} packages offer the backend fx_fusion"
        return [Check("entry point", "warn", text, "Uninstall all but one.", shared=text)]
    return [Check("entry point", "ok", 'backend="fx_fusion" is found', shared="found")]


def switched_off() -> list[Check]:
    """The variable that switches fx_fusion off."""
    value = os.environ.get(switch.VARIABLE, "")
    try:
        off = switch.environment_disables()
    except SettingError as error:
        return [Check("switch", "fail", str(error), f"Unset {switch.VARIABLE}.", shared=value)]
    if off:
        text = f"{switch.VARIABLE}={value}: nothing is fused"
        return [Check("switch", "warn", text, f"Unset {switch.VARIABLE}.", shared="off")]
    return [Check("switch", "ok", f"on ({switch.VARIABLE} isn't set to 1)", shared="on")]


def chosen_kernel() -> list[Check]:
    """What `kernel="auto"` chooses here for a common site."""
    arch = (compat.device_archs() or ("cpu",))[0].split(":")[0]
    world_size = max(2, count_in_environment("WORLD_SIZE", 2))
    cause = toolchain.cpu_kernel().cause if arch == "cpu" else ""
    problem = Problem(_HIDDEN_SIZE, torch.bfloat16, world_size, arch, None, False, cause)
    plan = select(problem, FusionSettings())
    where = f"bfloat16, hidden size {_HIDDEN_SIZE}, {arch}, {world_size} ranks"
    if isinstance(plan, Plan) and plan.kernel != UNFUSED:
        return [Check("kernel", "ok", f"{plan.kernel} ({where})", shared=plan.digest)]
    text = f"the unfused path ({where})"
    if isinstance(plan, Plan):
        text += f": {plan.cause}"
    remedy = "Graphs are rewritten and right, but no faster."
    if arch != "cpu":
        remedy += ' kernel="fx_fusion" takes the GPU kernel where it can run.'
    return [Check("kernel", "warn", text, remedy, shared="unfused")]

"""The errors a user can cause, each saying what was given, what is valid and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FxFusionError(Exception):
    """Base of every error fx_fusion raises on purpose."""


class SettingError(FxFusionError, ValueError):
    """An option has an unknown name or a value outside its valid set."""


class WorldSizeError(FxFusionError, RuntimeError):
    """A compiled graph met a process group of another size than it was compiled for."""


class GradientError(FxFusionError, RuntimeError):
    """The fused op was called on tensors that require grad, which it has no formula for."""


class PlanMismatchError(FxFusionError, RuntimeError):
    """The ranks of a group were planned differently, so their kernels can't work together."""


class PeerTimeoutError(FxFusionError, RuntimeError):
    """A rank of the group didn't come to a call within the time allowed."""


class CaptureError(FxFusionError, RuntimeError):
    """A CUDA graph is being captured, and what has to exist before that doesn't yet."""


class GroupError(FxFusionError, RuntimeError):
    """A process group is missing, or not usable for what was asked."""


class RegistrationError(FxFusionError, ValueError):
    """An op given to `register_rms_norm` or `register_all_reduce` can't be used as told."""


class PassFailedError(FxFusionError, RuntimeError):
    """The pass failed on a graph that was asked for, so what was asked for isn't there."""


class DataNeededError(FxFusionError, RuntimeError):
    """A call can't be followed to its end without the value of a tensor."""


class SaveError(FxFusionError, OSError):
    """A report can't be saved where it was asked to be."""


class SpawnError(FxFusionError, RuntimeError):
    """A rank started by `fx_fusion.testing.spawn` failed, died or ran out of time."""


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """The message for a misspelt name: what was given, the nearest valid one, all of them."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(names) if len(names) <= 12 else f"{len(names)} names"
    return f"{name!r} is not a {kind}.{hint} Valid: {shown}."

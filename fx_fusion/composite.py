"""Several custom passes in one slot: the user's, in their order, then ours.

Inductor takes a list in a slot from torch 2.13 on; one pass that calls the others works in every
release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fx_fusion import compat
from fx_fusion.errors import SettingError
from fx_fusion.passes.graph_pass import FusionPass, flattened
from fx_fusion.settings import FusionSettings


class CompositePass(compat.InferenceAwarePass):
    """Calls its members one after the other on the same graph.

    Attributes:
        members: The passes, first to last.
    """

    def __init__(self, members: tuple[Any, ...]) -> None:
        """Make one pass of several."""
        self.members = members

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        """Call each member, with `is_inference` for those that Inductor would give it to."""
        for member in self.members:
            if isinstance(member, FusionPass) or (
                compat.is_inference_aware(member) and is_inference is not None
            ):
                member(graph, is_inference=is_inference)
            else:
                member(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The members' uuids; None, which turns caching off, if one of them has none."""
        if not all(isinstance(member, compat.CustomGraphPass) for member in self.members):
            return None
        uuids = tuple(member.uuid() for member in self.members)
        return uuids if all(uuids) else None

    def __eq__(self, other: object) -> bool:
        """True for the same passes in the same order."""
        return isinstance(other, CompositePass) and other.members == self.members

    def __hash__(self) -> int:
        """Equal for equal members."""
        return hash((CompositePass, self.members))

    def __repr__(self) -> str:
        """The members."""
        return f"CompositePass({self.members})"


def composed(present: object, settings: Mapping[str, Any]) -> FusionPass | CompositePass:
    """Put our pass behind what stands in the slot.

    Wrapping twice is harmless: there's one FusionPass in the end, last in order, and a setting given
    again replaces the earlier value while the others stay.

    Args:
        present: What the slot holds: None, a pass or function, a list or tuple of these, or what
            this function returned before.
        settings: The settings given by name; the rest keep their value.

    Raises:
        SettingError: An unknown setting, a value out of range, or something in the slot that
            can't be called.
    """
    passes = tuple(present) if isinstance(present, (list, tuple)) else (present,)
    members = [p for p in flattened(passes) if p is not None]
    merged: dict[str, Any] = {}
    for member in members:
        if isinstance(member, FusionPass):
            merged.update(_changed(member.settings))
        elif not callable(member):
            raise SettingError(
                f"{compat.POST_PASS} holds {member!r}, which can't be called: give a function of"
                " one graph, a CustomGraphPass, or a list of these."
            )
    ours = FusionPass(FusionSettings.from_dict({**merged, **settings}))
    theirs = [member for member in members if not isinstance(member, FusionPass)]
    return CompositePass((*theirs, ours)) if theirs else ours


def _changed(settings: FusionSettings) -> dict[str, Any]:
    """The settings that differ from the defaults, by name."""
    default = FusionSettings()
    return {
        name: getattr(settings, name)
        for name in FusionSettings.names()
        if getattr(settings, name) != getattr(default, name)
    }

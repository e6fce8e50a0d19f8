"""The options of fx_fusion: validated once, frozen, and part of the compile-cache key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from fx_fusion.errors import SettingError, unknown_name

#: What `kernel=` may be. "auto" takes the best measured for the machine.
KERNELS: Final = ("auto", "fx_fusion", "flashinfer", "aiter", "unfused")


@dataclass(frozen=True)
class Target:
    """The machine to plan for, when it isn't the one that compiles.

    Attributes:
        arch: "cpu", an NVIDIA "sm_90", or an AMD "gfx942".
        world_size: Ranks in the tensor-parallel group; None takes the group's own.
    """

    arch: str = "cpu"
    world_size: int | None = None

    def __post_init__(self) -> None:
        """Raise SettingError for an arch or world size that can't exist."""
        if not (self.arch == "cpu" or self.arch.startswith(("sm_", "gfx"))):
            raise SettingError(
                f"Target(arch={self.arch!r}) is not an architecture: give 'cpu', 'sm_NN'"
                " (NVIDIA) or 'gfxNNN' (AMD)."
            )
        if self.world_size is not None and self.world_size < 1:
            raise SettingError(
                f"Target(world_size={self.world_size}) must be at least 1, or None for the"
                " group's own."
            )


@dataclass(frozen=True)
class FusionSettings:
    """Every option that steers the pass; all of them enter the compile-cache key.

    Attributes:
        kernel: "auto", or one of KERNELS. A kernel that can't run a site leaves it unfused
            with Reason.KERNEL_UNAVAILABLE. "flashinfer" and "aiter" are libraries that have to be
            installed on every rank; where one isn't, calls take the unfused path and a WARNING
            says why. Their kernels wait for other ranks without a time limit, and their memory
            is made at the first call, which must not be under capture. "auto" never takes them.
        merge_all_reduces: Turn `AR(a) + AR(b)` of one group into `AR(a + b)`. One collective
            less, but the partial sums are added and rounded to the activation dtype on each
            rank before they are reduced, so the last bit can differ from eager.
        deterministic: Sum over ranks in fp32 in rank order at every size (all_gather plus
            local sum where no kernel of ours can run), so that a row's result depends neither
            on the batch nor on the collective library.
        target: Plan for this machine instead of the one that compiles (explain only).
    """

    kernel: str = "auto"
    merge_all_reduces: bool = False
    deterministic: bool = False
    target: Target | None = None

    def __post_init__(self) -> None:
        """Raise SettingError for a value of the wrong type or outside the valid set."""
        if self.kernel not in KERNELS:
            raise SettingError(
                f"kernel={self.kernel!r} is not a kernel: choose one of {', '.join(KERNELS)}."
            )
        for name in ("merge_all_reduces", "deterministic"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise SettingError(f"{name}={value!r} must be True or False.")
        if self.target is not None and not isinstance(self.target, Target):
            raise SettingError(
                f"target={self.target!r} must be a fx_fusion.Target, such as"
                ' Target(arch="sm_90", world_size=8).'
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The options' names."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> FusionSettings:
        """Build from keyword options; an unknown name raises with a did-you-mean."""
        for name in settings:
            if name not in cls.names():
                raise SettingError(unknown_name("fx_fusion option", name, cls.names()))
        return cls(**settings)

    def key(self) -> tuple[tuple[str, str], ...]:
        """A stable, picklable form for the compile-cache key."""
        return tuple(sorted((name, repr(value)) for name, value in asdict(self).items()))

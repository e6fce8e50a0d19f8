"""The options that put fx_fusion into Inductor, beside the passes a user has there already."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from fx_fusion import compat, switch
from fx_fusion.composite import composed
from fx_fusion.errors import SettingError, unknown_name
from fx_fusion.settings import FusionSettings

log = logging.getLogger(__name__)

#: Put before a setting's name where it stands among Inductor's options, this always means ours.
PREFIX: Final = "fx_fusion."


def inductor_options(
    options: Mapping[str, Any] | None = None, *, mode: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` that add fx_fusion to Inductor.

    Custom passes in the slot `post_grad_custom_post_pass`, of `options` or else of the global
    `torch._inductor.config` as it is now, are kept: they run first, in their order. Calling this on
    its own result is harmless; settings given again replace the earlier ones.

    Args:
        options: Inductor's options, as torch.compile takes them. `"mode"` may be among them, since
            torch.compile refuses `mode` beside `options`.
        mode: What torch.compile calls `mode`, such as "reduce-overhead"; explicit options win over
            those it stands for.
        **settings: fx_fusion's own options, see `FusionSettings`.

    Returns:
        A new dict of Inductor options with underscores in their names.

    Raises:
        SettingError: An unknown option, setting or mode, or two different modes.
    """
    switch.environment_disables()  # a bad value is better met here than inside a compilation
    if FusionSettings.from_dict(settings).target is not None:
        raise SettingError(
            "target= plans for another machine, so it is for fx_fusion.explain alone: leave it out"
            " where code is compiled to run here."
        )
    given = dict(options or {})
    chosen = _one_mode(mode, given.pop("mode", None))
    result = _mode_options(chosen)
    result.update(_checked(given, compat.inductor_option_names()))
    present = result.get(compat.POST_PASS, compat.ambient_post_pass())
    result[compat.POST_PASS] = composed(present, settings)
    if not result.get(compat.RUN_PASSES, compat.runs_post_grad_passes()):
        log.warning(
            "fx_fusion fuses nothing, as Inductor runs no post-grad pass with %s=False%s; set that"
            " option to True to have it run.",
            compat.RUN_PASSES,
            f" (part of mode {chosen!r})" if chosen == "lite" else "",
        )
    return result


def split_options(
    options: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part options into Inductor's (mode included) and fx_fusion's.

    Ours are known by their bare name, or with "fx_fusion." before it. A bare name that Inductor
    has too ("deterministic") goes to both, since Inductor's own meaning must be kept.

    Raises:
        SettingError: A name that neither has.
    """
    ours: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    names = FusionSettings.names()
    known = compat.inductor_option_names()
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        bare = name.removeprefix(PREFIX)
        if bare in names:
            if ours.get(bare, value) != value:
                raise SettingError(
                    f"the option {bare!r} is given twice, as {ours[bare]!r} and as {value!r}:"
                    " give it once."
                )
            ours[bare] = value
        if name == "mode" or name in known:
            inductor[name] = value
        elif bare not in names:
            raise SettingError(
                unknown_name(
                    "known option of fx_fusion or Inductor", key, [*names, "mode", *known]
                )
            )
    return inductor, ours


def _checked(options: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    result = {}
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in known:
            hint = ""
            if name.removeprefix(PREFIX) in FusionSettings.names():
                hint = " It is an fx_fusion option: give it to inductor_options by keyword."
            raise SettingError(
                unknown_name("known Inductor option", key, ["mode", *known]) + hint
            )
        result[name] = value
    return result


def _one_mode(first: str | None, second: str | None) -> str | None:
    if first is not None and second is not None and first != second:
        raise SettingError(
            f"mode={first!r} and options={{'mode': {second!r}}} differ: give the mode once."
        )
    return first if first is not None else second


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    names = compat.mode_names()
    if mode not in names:
        raise SettingError(unknown_name("mode", str(mode), names))
    return compat.mode_options(mode)

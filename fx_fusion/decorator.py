"""`fx_fusion.compile`: torch.compile with fx_fusion, as a function or a decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import torch

from fx_fusion import backend, compat
from fx_fusion.errors import SettingError
from fx_fusion.inductor_options import PREFIX, inductor_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


class Settings(TypedDict, total=False):
    """fx_fusion's own options by keyword; see `FusionSettings`."""

    kernel: str
    merge_all_reduces: bool
    deterministic: bool


@overload
def compile(
    target: Compiled,
    /,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    disable: bool = ...,
    **settings: Unpack[Settings],
) -> Compiled: ...


@overload
def compile(
    target: None = None,
    /,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    disable: bool = ...,
    **settings: Unpack[Settings],
) -> Callable[[Compiled], Compiled]: ...


def compile(
    target: Any = None,
    /,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    disable: bool = False,
    **settings: Any,
) -> Any:
    """Compile with fx_fusion: `@compile`, `@compile(dynamic=True, ...)` or `compile(model)`.

    Args:
        target: What to compile. A function or method gives a compiled one with the same signature,
            name and docstring. An nn.Module class has its `forward` compiled and is returned
            itself; so is an nn.Module, which is compiled in place (`nn.Module.compile`), so that its
            type and the names of its parameters stay.
        fullgraph: As for torch.compile: a graph break is an error.
        dynamic: As for torch.compile: sizes may change without compiling again.
        mode: As for torch.compile; here it may be given beside `options`.
        options: Inductor's options.
        disable: As for torch.compile: leave the target as it is. (`fx_fusion.disable()` compiles
            without our pass.)
        **settings: fx_fusion's own options, see `FusionSettings`.

    Raises:
        SettingError: An unknown option, setting or mode, at once rather than when compiling.
    """
    inductor_options(options, mode=mode, **settings)  # checks all of them

    def decorate(found: Any) -> Any:
        return _compile(found, fullgraph, dynamic, disable, _all(options, mode, settings))

    return decorate if target is None else decorate(target)


def _all(
    options: Mapping[str, Any] | None, mode: str | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything in one dict of options for the backend, ours under their long names."""
    result = {**(options or {}), **{PREFIX + name: v for name, v in settings.items()}}
    if mode is not None:
        result["mode"] = mode
    return result


def _compile(
    target: Any, fullgraph: bool, dynamic: bool | None, disable: bool, options: dict[str, Any]
) -> Any:
    arguments: dict[str, Any] = {
        "backend": compat.installed_backend("fx_fusion", backend.fx_fusion),
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "disable": disable,
        "options": options or None,
    }
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(torch.compile(target.__func__, **arguments))
    if inspect.isclass(target):
        if not issubclass(target, torch.nn.Module):
            raise SettingError(
                f"compile({target.__qualname__}) takes an nn.Module class, a module, a function or"
                " a method; this is another kind of class. Decorate its methods instead."
            )
        setattr(target, "forward", torch.compile(target.forward, **arguments))  # noqa: B010
        return target
    if isinstance(target, torch.nn.Module):
        target.compile(**arguments)
        return target
    if not callable(target):
        raise SettingError(
            f"compile({target!r}) takes a function, a method, an nn.Module or its class."
        )
    return torch.compile(target, **arguments)

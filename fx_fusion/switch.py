"""The switch that turns fx_fusion off: a context manager and an environment variable.

It acts while code is compiled. What was compiled stays as it is, and torch.compile keeps it
for later calls; use `torch.compiler.reset()` to compile anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from weakref import WeakKeyDictionary

from fx_fusion import compat
from fx_fusion.errors import SettingError

#: The environment variable, read anew at each compilation.
VARIABLE: Final = "FX_FUSION_DISABLE"

_TRUE: Final = ("1", "true")
_FALSE: Final = ("", "0", "false")

# Per thread and per asyncio task: ranks that compile in several threads must each get what
# their own code asked for, since a rank that differs from its peers would hang them.
_choice: ContextVar[bool | None] = ContextVar("fx_fusion_disabled", default=None)

# A compilation reads the switch once. Its backward graph may be compiled much later and in
# another thread; it then gets the state that its forward graph was compiled with.
_of_scope: WeakKeyDictionary[object, bool] = WeakKeyDictionary()


@contextmanager
def disable(disabled: bool = True) -> Iterator[None]:
    """Compile without fx_fusion inside this block; its sites are reported as DISABLED.

    May be nested and used as a decorator. It holds for the thread (or asyncio task) that enters
    it, wins over the environment variable, and is part of the compile-cache key. Code compiled before
    keeps running as it was compiled.

    Args:
        disabled: False switches on again, as inside another `disable()`.
    """
    token = _choice.set(bool(disabled))
    try:
        yield
    finally:
        _choice.reset(token)


def is_disabled() -> bool:
    """True if fx_fusion is switched off for code compiled here and now.

    Raises:
        SettingError: The environment variable has a value that is neither yes nor no.
    """
    choice = _choice.get()
    return environment_disables() if choice is None else choice


def environment_disables() -> bool:
    """True if FX_FUSION_DISABLE is 1 or true; False if 0, false, empty or not set.

    Raises:
        SettingError: It has another value.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SettingError(
        f"{VARIABLE}={os.environ[VARIABLE]!r} is neither yes nor no: set it to 1 or true to switch"
        " fx_fusion off, to 0 or false to leave it on, or remove it."
    )


def is_disabled_for_compile() -> bool:
    """`is_disabled()` as it was when the current compilation began.

    Outside a compilation it is `is_disabled()`.
    """
    scope = compat.compile_scope()
    if scope is None:
        return is_disabled()
    return _of_scope.setdefault(scope, is_disabled())

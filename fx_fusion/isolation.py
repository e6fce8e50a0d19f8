"""Run a function through Dynamo, and leave the process as it was.

Dynamo keeps what it compiles, and what it learnt about sizes, by code object. Looking at a
function must not make a later real compilation of it another one: this module takes note of what
is there, gives Dynamo a clean slate, and afterwards removes what was added. Modules get the
attributes and gradients back that they had before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, Final

import torch
from torch import nn
from torch._C._dynamo import eval_frame as dynamo_c
from torch._dynamo import convert_frame, pgo
from torch._dynamo import eval_frame as dynamo
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import counters

# Dynamo is partly annotated.
_pgo: Final[Any] = pgo
_dynamo_c: Final[Any] = dynamo_c


class _Sentinel:
    """Something that no frame holds, for `_forget_new_entries`."""


_NOWHERE: Final = _Sentinel()


@contextlib.contextmanager
def dynamo_untouched(backend: object) -> Iterator[None]:
    """Compile inside this block with `backend` as if nothing had been compiled before.

    Afterwards nothing of it is left: neither compiled code, nor sizes learnt to be dynamic, nor
    counts. Code that other backends compiled stays and needs no compiling again.
    """
    known = frozenset(map(id, _seen_codes()))
    # By id, since a code object equals its copies.
    entries: dict[int, tuple[CodeType, list[Any]]] = {}

    def note(code: CodeType, new_code: CodeType) -> None:
        del new_code
        if id(code) not in entries:
            found = _dynamo_c._debug_get_cache_entry_list(code)
            entries[id(code)] = code, [entry.guard_manager for entry in found]

    counts = {name: Counter(counter) for name, counter in counters.items()}
    learnt = _pgo._CODE_STATE, _pgo._INIT_CODE_STATE
    _pgo._CODE_STATE, _pgo._INIT_CODE_STATE = defaultdict(_pgo.CodeState), None
    handle = convert_frame.register_bytecode_hook(note)
    try:
        with torch._dynamo.config.patch(
            automatic_dynamic_local_pgo=False,
            automatic_dynamic_remote_pgo=False,
            caching_precompile=False,
            suppress_errors=False,
        ):
            yield
    finally:
        handle.remove()
        _pgo._CODE_STATE, _pgo._INIT_CODE_STATE = learnt
        for code in _seen_codes():
            if id(code) not in known:
                _dynamo_c.reset_code(code)
        for code, old in entries.values():
            if id(code) in known:
                _forget_new_entries(code, old)
        dynamo.cached_backends.pop(id(backend), None)
        _restore_counters(counts)


def _seen_codes() -> list[CodeType]:
    """The code objects Dynamo has looked at in this process and that still live."""
    found = (reference() for reference in convert_frame.input_codes.seen)
    return [code for code in found if code is not None]


def _forget_new_entries(code: CodeType, old: list[Any]) -> None:
    """Make what was compiled for `code` since then unusable, and let go of its memory.

    Single entries can't be taken out. They count towards the recompile limit, unless their
    guards are about another object than the frame's, so these say they are.
    """
    for entry in _dynamo_c._debug_get_cache_entry_list(code):
        if any(entry.guard_manager is guards for guards in old):
            continue
        gone: Any = DeletedGuardManagerWrapper("it was compiled to be looked at only")
        gone.id_matched_objs = {"": weakref.ref(_NOWHERE)}
        state = entry.guard_manager.extra_state
        if state is not None:
            state.invalidate(entry, gone)


def _restore_counters(counts: dict[str, Counter[str]]) -> None:
    for name in list(counters):
        if name not in counts:
            del counters[name]
        else:
            counters[name].clear()
            counters[name].update(counts[name])


@contextlib.contextmanager
def modules_untouched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules and parameters back the attributes and gradients they have now.

    Inside the block, modules compiled in place are plain ones. Contents of the objects that
    attributes hold (a list, a cache) aren't looked at.
    """
    every = list({id(part): part for whole in modules for part in whole.modules()}.values())
    saved = [
        (held, dict(held))
        for module in every
        for held in (module.__dict__, module._parameters, module._buffers, module._modules)
    ]
    gradients = [
        (p, p.grad) for module in every for p in module._parameters.values() if p is not None
    ]
    try:
        for module in every:
            if module.__dict__.get("_compiled_call_impl") is not None:
                module.__dict__["_compiled_call_impl"] = None
        yield
    finally:
        for held, before in saved:
            if held.keys() != before.keys() or any(held[k] is not v for k, v in before.items()):
                held.clear()
                held.update(before)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


def modules_of(fn: Callable[..., Any], values: Iterable[object]) -> list[nn.Module]:
    """The modules a call can reach at first hand.

    These are `fn` itself, what it is bound to (and that object's attributes), what it closes over,
    globals it names, and arguments.
    """
    found: list[object] = [fn, *values]
    if isinstance(fn, functools.partial):
        found += [fn.func, *fn.args, *fn.keywords.values()]
    function = inspect.unwrap(getattr(fn, "__func__", fn))
    if inspect.isfunction(function):
        with contextlib.suppress(ValueError):  # a variable that isn't set yet
            held = inspect.getclosurevars(function)
            found += [*held.nonlocals.values(), *held.globals.values()]
    owner = getattr(fn, "__self__", fn)
    found.append(owner)
    if not inspect.isroutine(owner):
        found += getattr(owner, "__dict__", {}).values()
    return [module for module in found if isinstance(module, nn.Module)]

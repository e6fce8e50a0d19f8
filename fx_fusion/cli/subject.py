"""What a command is told to look at, `FILE:CALLABLE` or `MODULE:CALLABLE`, as a call with tensors.

Two protocols:

* a function that returns `(callable, args)` or `(callable, args, kwargs)`;
* an nn.Module class made without arguments, or a module, with a method `example_inputs(tokens)`
  that returns the arguments of its forward.

The function, the class and the method may take any of `tokens`, `dtype` and `world_size` by name.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import fx_fusion
from fx_fusion.errors import FxFusionError, unknown_name
from fx_fusion.testing import fake_group

#: For `--help` of the commands that take a callable.
PROTOCOL_HELP: Final = (
    "FILE.py:CALLABLE or MODULE:CALLABLE. CALLABLE is a function that returns (callable, args) or"
    " (callable, args, kwargs), or an nn.Module class made without arguments that has a method"
    " example_inputs(tokens), which returns the arguments of its forward. Both may take any of tokens, dtype"
    " and world_size by name. They run in a process group of --world-size ranks that needs no other"
    " process, with torch.device('meta') and the dtype as the default, so no weights are needed."
)

DTYPES: Final = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

_RETURNS: Final = "(callable, args) or (callable, args, kwargs), with args a tuple or a list"
_EXAMPLE: Final = (
    "a function that returns (callable, args), or an nn.Module class with a method"
    " example_inputs(tokens)"
)


class SubjectError(FxFusionError, ValueError):
    """What the command was told to look at doesn't exist, or isn't of a kind it can look at."""


@dataclass(frozen=True)
class Call:
    """One call to look at: `fn(*args, **kwargs)`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name as the command line takes it; SubjectError for an unknown one."""
    if name not in DTYPES:
        raise SubjectError(unknown_name("dtype", name, DTYPES))
    return DTYPES[name]


def load(text: str) -> Any:
    """The object that `FILE:CALLABLE` or `MODULE:CALLABLE` names; its module is imported.

    Raises:
        SubjectError: There is no such file, module or attribute, or the import failed.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise SubjectError(_no_callable(where or name))
    is_file = where.endswith(".py") or os.sep in where
    module = _from_file(Path(where)) if is_file else _from_name(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            valid = [n for n, value in vars(found).items() if _may_be_meant(n, value, module)]
            raise SubjectError(unknown_name(f"callable of {where}", part, valid))
        found = getattr(found, part)
    return found


def _no_callable(where: str) -> str:
    names = []
    if where.endswith(".py") and Path(where).is_file():
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            tree = ast.parse(Path(where).read_text(encoding="utf-8"))
            kinds = (ast.FunctionDef, ast.ClassDef)
            names = [node.name for node in tree.body if isinstance(node, kinds)]
    has = f" It has {', '.join(names[:12])}." if names else ""
    return f"{where!r} names no callable: give FILE.py:CALLABLE or MODULE:CALLABLE.{has}"


def _may_be_meant(name: str, value: object, module: object) -> bool:
    if name.startswith("_") or not callable(value):
        return False
    return getattr(value, "__module__", None) in (None, getattr(module, "__name__", None))


def _from_file(path: Path) -> Any:
    if not path.is_file():
        folder = path.parent
        near = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
        raise SubjectError(
            unknown_name(f"file in {folder}", path.name, near)
            if near
            else f"there is no file {path}: give FILE.py:CALLABLE, or MODULE:CALLABLE with dots."
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SubjectError(f"{path} can't be imported: give a Python file.")
    module = importlib.util.module_from_spec(spec)
    # as `python FILE` does, so that the file can import its neighbours
    sys.path.insert(0, str(path.parent.resolve()))
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses and pickle look there
    try:
        with user_code(f"importing {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        _put_back(path.stem, before)
        raise
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _put_back(name: str, module: Any) -> None:
    if module is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module


def _from_name(name: str) -> Any:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script doesn't have it
    try:
        missing = importlib.util.find_spec(name) is None
    except (ModuleNotFoundError, ValueError):
        missing = True
    if missing:
        hint = (
            f" There is a file {name}.py: did you mean {name}.py:...?"
            * Path(f"{name}.py").is_file()
        )
        raise SubjectError(
            f"there is no module {name!r} here: give FILE.py:CALLABLE, or a module that can be"
            f" imported.{hint}"
        )
    with user_code(f"importing {name}"):
        return importlib.import_module(name)


@contextlib.contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Turn what the user's code raises into a SubjectError with the user's frames."""
    try:
        yield
    except FxFusionError:
        raise
    except (Exception, SystemExit) as error:
        raise SubjectError(f"{doing} raised {_told(error)}") from error


def _told(error: BaseException) -> str:
    cause = error
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        while cause.__cause__ is not None or cause.__context__ is not None:
            cause = cause.__cause__ or cause.__context__ or cause
    text = str(cause).strip()
    shown = text if len(text) < _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."
    lines = [f"{type(cause).__name__}: {shown}".rstrip(": ")]
    # Dynamo keeps where it was in the code that it followed.
    frames = [
        *traceback.extract_tb(error.__traceback__),
        *(getattr(error, "real_stack", None) or ()),
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    lines += [f"  at {frame.filename}:{frame.lineno}: {frame.line}" for frame in own[-3:]]
    hint = next((hint for words, hint in _HINTS.items() if words in text), "")
    return "\n".join([*lines, *([hint] if hint else [])])


#: How much of an error's text is shown.
_MOST_TEXT: Final = 1500
_PACKAGES: Final = (torch, fx_fusion)
#: Where frames aren't the user's.
_NOT_THE_USERS: Final = (
    *(str(Path(folder)) for package in _PACKAGES for folder in package.__path__),
    "<frozen",
    str(Path(contextlib.__file__)),
    str(Path(importlib.__file__).parent),
)
#: What to do about errors that come of how the command runs the user's code, by their words.
_HINTS: Final = {
    "default process group twice": (
        "The command has made a process group already: call init_process_group only if"
        " torch.distributed.is_initialized() is false."
    ),
    "meta tensor": "The code needs values of tensors: try --real-tensors, which makes them on the CPU.",
    "on meta tensors": "The code needs values of tensors: try --real-tensors, which makes them on the CPU.",
}


@contextlib.contextmanager
def tensor_parallel(world_size: int, dtype: torch.dtype) -> Iterator[None]:
    """A fake process group and a default dtype, for everything that is done with a subject."""
    before = torch.get_default_dtype()
    with fake_group(world_size):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def call_of(
    found: Any, name: str, *, tokens: int, dtype: torch.dtype, world_size: int, real: bool
) -> Call:
    """Make the call to look at, by one of this module's protocols.

    Args:
        found: What `load` gave.
        name: How the user called it, for messages.
        tokens: Rows of the input.
        dtype: The default dtype.
        world_size: Ranks of the fake group, which exists already.
        real: Make real tensors on the CPU instead of tensors on the meta device.

    Raises:
        SubjectError: It follows no protocol, or raised.
    """
    offered = {"tokens": tokens, "dtype": dtype, "world_size": world_size}
    place = contextlib.nullcontext() if real else torch.device("meta")
    with place:
        if isinstance(found, nn.Module) or (
            isinstance(found, type) and issubclass(found, nn.Module)
        ):
            return _module_call(found, name, offered)
        if not callable(found):
            raise SubjectError(
                f"{name} is a {type(found).__name__}, not callable: give {_EXAMPLE}."
            )
        given = _accepted(found, name, offered)
        with user_code(f"{name}({_shown(given)})"):
            made = found(**given)
    return _checked(made, name)


def _module_call(found: Any, name: str, offered: Mapping[str, Any]) -> Call:
    if not callable(getattr(found, "example_inputs", None)):
        raise SubjectError(
            f"{name} is an nn.Module without a method example_inputs(tokens) that returns the"
            f" arguments of its forward: add it, or give {_EXAMPLE}."
        )
    module = found
    if isinstance(found, type):
        given = _accepted(found, name, offered)
        with user_code(f"{name}({_shown(given)})"):
            module = found(**given)
    given = _accepted(module.example_inputs, f"{name}.example_inputs", offered)
    with user_code(f"{name}.example_inputs({_shown(given)})"):
        inputs = module.example_inputs(**given)
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)):
        raise SubjectError(
            f"{name}.example_inputs returned {_kind(inputs)}: return a tensor, or a tuple of the"
            " arguments of forward."
        )
    return Call(module, tuple(inputs))


def _accepted(fn: Any, name: str, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered values that it takes by name."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if unknown := [n for n in needed if n not in offered]:
        raise SubjectError(
            f"{name} needs {', '.join(unknown)}, which the command can't give: it may take"
            f" {', '.join(offered)} by name; give the others defaults."
        )
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


def _checked(made: Any, name: str) -> Call:
    valid = f"return {_RETURNS}."
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise SubjectError(f"{name} returned {_kind(made)}: {valid}")
    fn, args, kwargs = made if len(made) == 3 else (*made, {})
    if not callable(fn):
        raise SubjectError(f"{name} returned {_kind(fn)} in first place: {valid}")
    if not isinstance(args, (tuple, list)):
        near = (
            " A single argument is (x,), with the comma."
            if isinstance(args, torch.Tensor)
            else ""
        )
        raise SubjectError(f"{name} returned {_kind(args)} in second place: {valid}{near}")
    if not isinstance(kwargs, Mapping):
        raise SubjectError(f"{name} returned {_kind(kwargs)} in third place: {valid}")
    return Call(fn, tuple(args), dict(kwargs))


def _kind(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, tuple) else f"a {kind}"


def _shown(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in given.items())

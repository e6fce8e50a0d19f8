"""`fx_fusion.explain`: what would be fused, and why the rest would not, before anything runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import fx_fusion
from fx_fusion.capture import Capture, When
from fx_fusion.errors import GroupError, SettingError, unknown_name
from fx_fusion.fake_inputs import as_fake, device_of, fake_mode_for, off_meta
from fx_fusion.isolation import dynamo_untouched, modules_of, modules_untouched
from fx_fusion.passes.source import place
from fx_fusion.report import FusionReport, GraphReport
from fx_fusion.settings import FusionSettings

#: torch.compile's own options that explain takes beside fx_fusion's.
_COMPILE_OPTIONS: Final = ("dynamic", "fullgraph", "mode", "options")

_NO_GROUP: Final = (
    "There is no process group in this process, so a model isn't tensor-parallel here. On one"
    " machine, make one that needs no other process around both the model and this call:"
    " with fx_fusion.testing.fake_group(8): ..."
)
_NO_GRAPH: Final = (
    "torch.compile found nothing to compile in this call (no tensor operations, or"
    " TORCHDYNAMO_DISABLE is set)."
)

#: What errors say that come of tensors without data, where they've no type of their own.
_DATA_WORDS: Final = (
    "FakeTensor",
    "fake tensor",
    "data pointer",
    "tensor subclass",
    "DataDependentOutputException",
    "data-dependent",
)


def explain(fn: Callable[..., Any], **settings: Any) -> Callable[..., FusionReport]:
    """Say what fx_fusion would make of a call, without running any kernel.

        print(fx_fusion.explain(model)(input_ids))

    torch.compile's own steps run on tensors without data, up to where code would be
    generated: no kernel, no collective, no second process, no compile cache. The call's tensors, a
    model's parameters, and what else torch.compile has compiled stay as they are. As in a real
    compilation, gradients are part of it where they're enabled and something requires them: use
    torch.no_grad() for inference.

    The call's Python code does run, with tensors that have no values. Where it needs one (`.item()`,
    `if tensor > 0`) the view ends, and the report says so in `incomplete`. Objects that it changes
    by other means than its arguments and modules stay changed, an optimizer's state say, so explain a
    model or a loss rather than a whole training loop.

    Args:
        fn: A function, method or nn.Module; if it is compiled, what it was made of.
        **settings: fx_fusion's options (see `FusionSettings`); among them `target`, which plans for
            a machine you don't have. Also torch.compile's `dynamic`, `fullgraph`, `mode`
            and `options`.

    Returns:
        A function that takes the arguments of `fn` and returns the FusionReport.

    Raises:
        SettingError: An unknown option or value, at once.
        GroupError: When called: the code needs a process group, and there is none.
    """
    _compiled_target(fn)
    _check(settings)

    def explained(*args: Any, **kwargs: Any) -> FusionReport:
        capture, incomplete = captured_call(fn, settings, args, kwargs)
        reports = tuple(g.report for g in capture.graphs if g.report is not None)
        return FusionReport(_with_notes(reports, incomplete), incomplete)

    return explained


def _check(settings: Mapping[str, Any]) -> None:
    """Raise SettingError for a setting that is wrong."""
    known = (*FusionSettings.names(), *_COMPILE_OPTIONS)
    for name in settings:
        if name not in known:
            raise SettingError(unknown_name("fx_fusion option", name, known))
    _capture(settings, None)


def _capture(settings: Mapping[str, Any], text: When | None) -> Capture:
    ours = {name: v for name, v in settings.items() if name in FusionSettings.names()}
    return Capture(ours, mode=settings.get("mode"), options=settings.get("options"), text=text)


def _compiled_target(fn: Any) -> Any:
    """What a compiled function or module was made of; anything else as it is."""
    if not callable(fn):
        raise SettingError(f"explain({fn!r}) takes a function, a method or an nn.Module.")
    if isinstance(fn, torch._dynamo.eval_frame.OptimizedModule):
        return fn._orig_mod
    if getattr(fn, "_torchdynamo_disable", False):
        return fn
    original = getattr(fn, "_torchdynamo_orig_callable", None)
    return fn if original is None else _compiled_target(original)


def captured_call(
    fn: Callable[..., Any],
    settings: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    text: When | None = None,
) -> tuple[Capture, str]:
    """Capture the graphs of one call.

    Args:
        fn: What `explain` takes.
        settings: As `explain` takes them.
        args: The call's arguments; `kwargs` those by keyword.
        text: What to keep of the graphs, see `Capture`.

    Returns:
        What was captured, and where and why the view ends early, "" if it doesn't.
    """
    _check(settings)
    fn = _compiled_target(fn)
    while isinstance(fn, functools.partial):  # its tensors are arguments like the others
        args, kwargs = (*fn.args, *args), {**fn.keywords, **kwargs}
        fn = _compiled_target(fn.func)
    capture = _capture(settings, text)
    leaves = pytree.tree_leaves((args, kwargs))
    modules = modules_of(fn, leaves)
    mode = fake_mode_for(modules, leaves)
    device = device_of(leaves)
    incomplete = ""
    with dynamo_untouched(capture), modules_untouched(modules), _real_tensors_allowed(mode):
        inputs, keywords = as_fake((args, dict(kwargs)), mode, device)
        off_meta(modules, mode, device)
        compiled: Callable[..., Any] = torch.compile(
            fn,
            backend=capture,
            dynamic=settings.get("dynamic"),
            fullgraph=settings.get("fullgraph", False),
        )
        try:
            with mode:
                compiled(*inputs, **keywords)
        except Exception as error:
            if not _needs_data(error):
                _raise_for_missing_group(error)
                raise
            incomplete = f"{_place(error)}: the value of a tensor is needed here"
    return capture, incomplete


@contextlib.contextmanager
def _real_tensors_allowed(mode: FakeTensorMode) -> Iterator[None]:
    """Let a mode of the user's meet real tensors, a model's parameters say, inside the block."""
    allowed = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = allowed


def _with_notes(reports: tuple[GraphReport, ...], incomplete: str) -> tuple[GraphReport, ...]:
    """The reports, with what the user should know if they hold nothing."""
    if any(report.sites for report in reports):
        return reports
    notes = []
    if not _has_group():
        notes.append(_NO_GROUP)
    if not reports and not incomplete:
        notes.append(_NO_GRAPH)
    if not notes:
        return reports
    first, *others = reports or (GraphReport(),)
    return (dataclasses.replace(first, notes=(*first.notes, *notes)), *others)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _raise_for_missing_group(error: Exception) -> None:
    words = ("process group", "process_group", "init_process_group")
    if not _has_group() and any(word in str(error) for word in words):
        raise GroupError(_NO_GROUP) from error


def _needs_data(error: BaseException) -> bool:
    """True for an error that comes of the tensors having no data."""
    if isinstance(error, torch._dynamo.exc.Unsupported):
        return False  # a graph break where fullgraph=True forbids it, as in a real compilation
    fake = torch._subclasses.fake_tensor
    kinds = (
        fake.DataDependentOutputException,
        fake.DynamicOutputShapeException,
        fake.UnsupportedFakeTensorException,
    )
    chain = list(_causes(error))
    if any(isinstance(link, kinds) for link in chain):
        return True
    # Dynamo's own wrappers print fake tensors whatever the cause was.
    own = [
        link for link in chain if not isinstance(link, torch._dynamo.exc.TorchDynamoException)
    ]
    return any(word in str(link) for link in own for word in _DATA_WORDS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


#: Where frames aren't the user's.
_LIBRARIES: Final = tuple(
    str(Path(folder)) for package in (torch, fx_fusion) for folder in package.__path__
)


def _place(error: BaseException) -> str:
    """The user's innermost line that an error came from: "model.py:12 in forward"."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if not own:
        return "somewhere in the call"
    return place(own[-1].filename, own[-1].lineno or 0, own[-1].name)

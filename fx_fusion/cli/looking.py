"""Make the calls that a command was told to look at, and look at them, at several numbers of tokens."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

import fx_fusion
from fx_fusion.cli import hf_subject, layers
from fx_fusion.cli import subject as subjects
from fx_fusion.cli.hf_subject import HfModel
from fx_fusion.cli.sites import DYNAMIC, Seen, Tokens
from fx_fusion.cli.subject import Call, SubjectError
from fx_fusion.errors import SettingError

#: Numbers of tokens a call is made with to see which sizes depend on it.
_PROBES: Final = (48, 56)


@dataclass(frozen=True)
class Asked:
    """What the command was told.

    Attributes:
        name: `FILE_OR_MODULE:CALLABLE`, or the path of a config.
        world_size: Ranks of the fake group.
        tokens: Ascending numbers, or ("dynamic",).
        dtype: As the command line takes it.
        settings: For `fx_fusion.explain`.
        real: Make real tensors on the CPU.
        training: Look with gradients enabled.
    """

    name: str
    world_size: int
    tokens: tuple[Tokens, ...]
    dtype: str
    settings: dict[str, Any] = field(default_factory=dict)
    real: bool = False
    training: bool = False


def parsed_tokens(text: str) -> tuple[Tokens, ...]:
    """Numbers in ascending order, or ("dynamic",)."""
    if text == "dynamic":
        return (text,)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SettingError(
            f"--tokens {text}: give numbers above 0 with commas between, such as 1,64,2048, or"
            " dynamic."
        )
    return tuple(sorted({int(part) for part in parts}))


def look(asked: Asked, hf: Path | None, every_layer: bool) -> tuple[list[Seen], HfModel | None]:
    """The report for each number of tokens."""
    dtype = subjects.dtype_of(asked.dtype)
    with subjects.tensor_parallel(asked.world_size, dtype):
        if hf is None:
            return _captured(asked, maker(asked)), None
        size = asked.world_size
        model = hf_subject.load_model(hf, dtype=dtype, world_size=size, every_layer=every_layer)
        seen = _captured(asked, model.call)
        if model.repetition is None:
            return seen, model
        whole = [layers.drawn_out(one.report, model.repetition) for one in seen]
        drawn = [Seen(s.tokens, r) for s, r in zip(seen, whole, strict=True) if r is not None]
        if len(drawn) == len(seen):
            return drawn, model
        # The layers came out differently though they're alike, so none may be left out.
        model = hf_subject.load_model(hf, dtype=dtype, world_size=size, every_layer=True)
        return _captured(asked, model.call), model


def _captured(asked: Asked, make: Callable[[int], Call]) -> list[Seen]:
    seen = []
    for tokens in asked.tokens:
        call = call_at(make, tokens)
        with following(asked, tokens):
            explained = fx_fusion.explain(
                call.fn, dynamic=None if tokens == DYNAMIC else False, **asked.settings
            )
            seen.append(Seen(tokens, explained(*call.args, **call.kwargs)))
    return seen


def _dynamic(make: Callable[[int], Call]) -> Call:
    """A call whose sizes are marked as dynamic where they depend on the number of tokens."""
    call, other = (make(tokens) for tokens in _PROBES)
    marked = 0
    pairs = [pytree.tree_leaves((one.args, one.kwargs)) for one in (call, other)]
    for tensor, twin in zip(*pairs, strict=True):
        if not isinstance(tensor, torch.Tensor):
            continue
        for dim, (size, twin_size) in enumerate(zip(tensor.shape, twin.shape, strict=True)):
            if size != twin_size:
                torch._dynamo.mark_dynamic(tensor, dim)
                marked += 1
    if not marked:
        raise SubjectError(
            "--tokens dynamic: no size of the arguments depends on tokens, so there is none to"
            " leave open; take tokens as a parameter, or give numbers."
        )
    return call


@contextlib.contextmanager
def following(asked: Asked, tokens: Tokens) -> Iterator[None]:
    """What a call is followed in: gradients as asked, errors as the user's, no one else's warnings."""
    told = logging.root.manager.disable
    # torch logs the traceback of each error that it also raises
    logging.disable(max(told, logging.ERROR if "TORCH_LOGS" not in os.environ else told))
    try:
        with (
            warnings.catch_warnings(),
            torch.set_grad_enabled(asked.training),
            subjects.user_code(f"following the call with {tokens} tokens"),
        ):
            warnings.simplefilter("ignore")  # torch's and transformers' own
            yield
    finally:
        logging.disable(told)


def maker(asked: Asked) -> Callable[[int], Call]:
    """Load what `FILE_OR_MODULE:CALLABLE` names; inside `subjects.tensor_parallel` it makes calls.

    Raises:
        SubjectError: See `subject.load`; the function returned raises as `subject.call_of`.
    """
    found = subjects.load(asked.name)

    def make(tokens: int) -> Call:
        return subjects.call_of(
            found,
            asked.name.rpartition(":")[2],
            tokens=tokens,
            dtype=subjects.dtype_of(asked.dtype),
            world_size=asked.world_size,
            real=asked.real,
        )

    return make


def call_at(make: Callable[[int], Call], tokens: Tokens) -> Call:
    """The call with so many tokens, or with sizes left open for "dynamic"."""
    return _dynamic(make) if isinstance(tokens, str) else make(tokens)

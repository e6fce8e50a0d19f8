"""Where in the user's code a node comes from, without any path of the machine."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

from torch import fx

_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')

#: Frames of the machinery between the user's model and the collective: shown last.
_LIBRARY_PARTS: Final = (
    "/torch/",
    "/fx_fusion/",
    "/transformers/distributed/",
    "/transformers/integrations/",
    "/accelerate/",
)


def source_of(node: fx.Node) -> str:
    """The user's line that made the node: "model.py:12 in forward"; "" if unknown.

    The innermost frame outside torch and the tensor-parallel plumbing is taken; if there is
    none, the innermost frame. Installed packages keep their path below site-packages, other
    files their name and folder.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    own = [f for f in frames if not any(part in f["file"] for part in _LIBRARY_PARTS)]
    frame = (own or frames)[-1]
    return place(frame["file"], frame["line"], frame["name"])


def place(path: str, line: str | int, function: str) -> str:
    """A line of code as reports show it: "model.py:12 in forward"."""
    # What Dynamo makes of the rest of a function, after a graph break, is named after it:
    # torch_dynamo_resume_in_forward_at_12.
    name = function.removeprefix("torch_dynamo_resume_in_")
    name = re.sub(r"_at_\d+$", "", name) if name != function else name
    return f"{short_path(path)}:{line} in {name}"


def short_path(path: str) -> str:
    """A path that reads the same on every machine."""
    parts = PurePath(path).parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :])
    return "/".join(parts[-1:])


def module_of(node: fx.Node) -> str:
    """The path of the innermost nn.Module the node was traced in, "layers.0.mlp"; or ""."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    entry = list(stack.values())[-1]
    name = str(entry[0] if isinstance(entry, (tuple, list)) else entry)
    # Dynamo writes L['self'].layers.0, or L['args'][0].layers.0 where a wrapper passes the model
    # on (transformers' forward): keep the dotted part
    name = re.sub(r"L\['(?:self'\]|args'\]\[0\])\.?", "", name)
    name = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", name)
    name = re.sub(r"\._modules\.|_modules\.", ".", name)
    return name.strip(".")

"""Excerpts of a graph around its sites, as plain data, for pictures and for `repro.py`.

Reads only. An excerpt of a site that leads to a norm holds the chain; of any other, what the
finder could have looked at: the readers of the reduced value up to the first op that a norm
can't be behind. Its size is bounded, so the cost is linear in the number of sites.
"""

from __future__ import annotations

import math
import operator
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from fx_fusion.passes import nodes
from fx_fusion.passes.find_sites import Site
from fx_fusion.passes.nodes import c10d
from fx_fusion.passes.outputs import chain_nodes
from fx_fusion.passes.stops import NORM_STEPS, looks_through
from fx_fusion.record import Excerpt, Line, Value

#: The largest number of ops in an excerpt of a site that leads to no norm.
MAX_NODES: Final = 24
#: How far back the computation of a weight or a scalar is followed.
_SMALL_DEPTH: Final = 4


def excerpt_before(site: Site) -> Excerpt:
    """The part of the graph that the pass judged."""
    inside = {site.all_reduce}
    if site.reduced is not None:
        inside.add(site.reduced)
    if site.norm is not None:
        inside.update(chain_nodes(site))
    else:
        inside.update(_readers(site.all_reduce))
    for node in list(inside):
        for source in node.all_input_nodes:
            if source is not site.x:
                inside.update(_sources(source, _SMALL_DEPTH))
    return _Writer(_roles(site)).excerpt(inside)


def excerpt_after(fused: fx.Node) -> Excerpt:
    """The fused op with the results that are taken out of it."""
    schema = fused.target._schema.arguments if hasattr(fused.target, "_schema") else ()
    named = {
        **dict(zip((argument.name for argument in schema), fused.args, strict=False)),
        **fused.kwargs,
    }
    roles = {
        value: name.removesuffix("_tensor")
        for name, value in reversed(named.items())
        if isinstance(value, fx.Node)
    }
    return _Writer(roles).excerpt({fused, *fused.users})


def _roles(site: Site) -> dict[fx.Node, str]:
    """The names of what a site reads."""
    found: dict[fx.Node, str] = {}
    norm = site.norm
    if norm is not None:
        named = (
            (norm.eps_node, "eps"),
            (norm.weight, "weight"),
            (norm.residual, "residual"),
            *((step.value, step.kind) for step in reversed(site.steps)),
        )
        found = {node: name for node, name in named if node is not None}
    if site.x is not None:
        found[site.x] = "x"
    return found


def _readers(start: fx.Node) -> set[fx.Node]:
    """`start` and what reads it, up to ops that are no step towards a norm."""
    seen = {start}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if not (node is start or _is_passed(node, start)):
            continue
        for user in nodes.users_in_order(node):
            if user.op != "output" and user not in seen and len(seen) < MAX_NODES:
                seen.add(user)
                queue.append(user)
    return seen


def _is_passed(node: fx.Node, start: fx.Node) -> bool:
    """True for an op whose readers belong to the excerpt; another all_reduce ends with its wait."""
    if nodes.is_op(node, c10d.wait_tensor.default):
        return node.args[0] is start or nodes.is_second_wait(node)
    reduces = nodes.is_op(node, c10d.all_reduce.default)
    return reduces or looks_through(node) or nodes.is_op(node, NORM_STEPS)


def _sources(node: fx.Node, depth: int) -> Iterator[fx.Node]:
    """What belongs to a site though it stands before it: another all_reduce it is added to, and
    how a weight or a scalar is computed (`1 + w`, a cast)."""
    if nodes.is_op(node, c10d.wait_tensor.default):
        yield node
        yield from (n for n in node.all_input_nodes if nodes.is_op(n, c10d.all_reduce.default))
        return
    value = nodes.tensor(node)
    small = value is not None and value.ndim <= 1
    if depth and small and node.op == "call_function" and looks_through(node):
        yield node
        for source in node.all_input_nodes:
            yield from _sources(source, depth - 1)


@dataclass
class _Writer:
    """Turns nodes into an excerpt."""

    roles: Mapping[fx.Node, str]
    names: dict[fx.Node, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    #: Where a size the compiler doesn't know can be read: "x.size(0)" by its expression.
    sizes: dict[str, str] = field(default_factory=dict)

    def excerpt(self, inside: set[fx.Node]) -> Excerpt:
        """The excerpt of these nodes."""
        ordered = [node for node in sorted(inside) if node.op == "call_function"]
        held = set(ordered)
        given = dict.fromkeys(n for node in ordered for n in node.all_input_nodes)
        inputs = []
        for node in (n for n in given if n not in held):
            if nodes.tensor(node) is None:
                continue  # a size; its value is written where it is read
            name = self.names[node] = self._input_name(node)
            value = _value(name, node)
            inputs.append(value)
            for dim, size in enumerate(value.shape):
                if isinstance(size, str):
                    self.sizes.setdefault(size, f"{name}.size({dim})")
        lines = tuple(self._line(node) for node in ordered)
        outside = [n for n in ordered if any(user not in held for user in n.users)]
        return Excerpt(tuple(inputs), lines, tuple(self.names[node] for node in outside))

    def _input_name(self, node: fx.Node) -> str:
        role = self.roles.get(node)
        if role is not None and role not in self.names.values():
            return role
        return self._new("input" if role is None else role)

    def _new(self, word: str) -> str:
        self.counts[word] = self.counts.get(word, 0) + 1
        return f"{word}_{self.counts[word]}"

    def _line(self, node: fx.Node) -> Line:
        reads = tuple(self.names[n] for n in node.all_input_nodes if n in self.names)
        code = self._code(node)
        op = nodes.op_name(node)
        short = "item" if node.target is operator.getitem else _short(node)
        name = self.names[node] = self._new(short.strip("_"))
        return Line(_value(name, node), op, code, reads, _label(node, short))

    def _code(self, node: fx.Node) -> str:
        """Python for the node, or "" where it holds something that can't be written."""
        try:
            args = [self._argument(arg) for arg in node.args]
            named = [f"{key}={self._argument(arg)}" for key, arg in node.kwargs.items()]
        except ValueError:
            return ""
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        if nodes.is_op(node, nodes.prims.convert_element_type.default):
            return f"{args[0]}.to({args[1]})"
        if not isinstance(node.target, torch._ops.OpOverload):
            return ""
        # The inputs' strides are the graph's own, but what is computed from them may differ.
        target = str(node.target)
        if target == "aten.view.default":
            target = "aten.reshape.default"
        if target.startswith("_c10d_functional.all_reduce"):
            args[-1] = "group"
        return f"torch.ops.{target}({', '.join([*args, *named])})"

    def _argument(self, value: object) -> str:
        if isinstance(value, fx.Node):
            held = value.meta.get("val")
            if isinstance(held, (torch.SymInt, torch.SymFloat)):
                return self._size(held)
            if value not in self.names:
                raise ValueError(value)
            return self.names[value]
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self._size(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            plain = not isinstance(value, float) or math.isfinite(value)
            return repr(value) if plain else f'float("{value}")'
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._argument(part) for part in value)
            return f"[{inner}]"
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value.type}")'
        raise ValueError(value)

    def _size(self, size: Any) -> str:
        return self.sizes.get(str(size)) or str(_number(size))


def _value(name: str, node: fx.Node) -> Value:
    held = node.meta.get("val")
    if isinstance(held, (list, tuple)):
        tensors = [value for value in held if isinstance(value, torch.Tensor)]
        full = [value for value in tensors if nodes.static_size(value.numel()) != 0]
        held = next(iter(full or tensors), None)
    if not isinstance(held, torch.Tensor):
        return Value(name)
    return Value(
        name,
        str(held.dtype).removeprefix("torch."),
        tuple(map(_known, held.shape)),
        held.device.type,
        tuple(map(_number, held.shape)),
        tuple(map(_number, held.stride())),
    )


def _known(size: object) -> int | str:
    static = nodes.static_size(size)
    return str(size) if static is None else static


def _number(size: Any) -> int:
    """A size as the compiled call had it; 16 where only data would tell. Adds no guard."""
    static = nodes.static_size(size)
    if static is not None:
        return static
    hint = getattr(size.node, "_hint", None)
    if hint is None and getattr(size.node, "has_hint", lambda: False)():
        hint = size.node.hint
    return 16 if hint is None else int(hint)


def _short(node: fx.Node) -> str:
    parts = nodes.op_name(node).split(".")
    return re.sub(r"\W+", "_", parts[1] if len(parts) > 1 else parts[0])


def _label(node: fx.Node, short: str) -> str:
    numbers = [f"{arg:.6g}" for arg in node.args if type(arg) in (int, float)]
    return f"{short} {numbers[0]}" if numbers and len(node.args) == 2 else short

"""One stable text form of an fx graph, used by snapshots, traces and dumps.

    p0: bf16[4, 64]
    p1: bf16[4, 64]
    n0: bf16[4, 64] = _c10d_functional.all_reduce(p0, 'sum', '0')
    n1: bf16[4, 64] = _c10d_functional.wait_tensor(n0)
    n2: bf16[4, 64] = aten.add.Tensor(p1, n1)
    return (n2,)

The text of a graph depends on what it computes, not on the machine, the device or torch's own
names: nodes and symbolic sizes are numbered as they appear, there are no paths, strides or
addresses, floats are printed as %.6g, arguments that equal an op's default are left out, inputs
that are no tensors and that no op reads too, and ops that torch's releases spell in several ways
have one name (`_SAME`).
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

#: Short names of dtypes, as torch's own printouts have them.
_DTYPES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2: "f8e5m2",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
}

#: Spellings of one and the same computation, which differ between releases and devices.
_SAME: Final = {
    "aten.view": "aten.reshape",
    "aten._unsafe_view": "aten.reshape",
    "aten.add.Scalar": "aten.add.Tensor",
    "aten.sub.Scalar": "aten.sub.Tensor",
    "aten.mul.Scalar": "aten.mul.Tensor",
    "aten.div.Scalar": "aten.div.Tensor",
}

#: The op of ours, written with keywords. `plan` is left out: it is a digest of the table of
#: measurements, so it changes when the table does while the graph stays the same.
_OWN_OP: Final = "fx_fusion.all_reduce_add_rms_norm"
_OWN_HIDDEN: Final = frozenset({"plan"})


def graph_text(graph: fx.Graph) -> str:
    """The graph as text, a line for each node, without a newline at the end.

    Placeholders are p0, p1, ..., other nodes n0, n1, ..., constants c0, ... and nested graphs
    g0, ..., written indented above their first use. Sizes the compiler doesn't know are s0, s1,
    ... (u0, ... where they depend on data). A node that yields a tuple shows its results' types
    where these are taken out of it. Never changes the graph or adds a guard.
    """
    return "\n".join(_Writer().lines(graph))


@dataclass
class _Symbols:
    """New names for the symbols of sizes, given as they appear."""

    # Any, as sympy is not annotated.
    names: dict[Any, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def text(self, expression: Any) -> str:
        """A size, a sympy expression, as text in the new names."""
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.names:
                self.names[symbol] = self._new(symbol)
        return str(expression.xreplace(self.names))

    def _new(self, symbol: Any) -> Any:
        letters = str(symbol).rstrip("0123456789")
        number = self.counts.get(letters, 0)
        self.counts[letters] = number + 1
        return type(symbol)(f"{letters}{number}", **symbol.assumptions0)


@dataclass
class _Writer:
    """Writes one graph, and the graphs nested in it with the same names for sizes."""

    symbols: _Symbols = field(default_factory=_Symbols)
    names: dict[fx.Node, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def lines(self, graph: fx.Graph) -> Iterator[str]:
        """The lines of a graph."""
        for node in graph.nodes:
            if node.op == "output":
                yield f"return {self._value(_without_idle_objects(node.args[0]))}"
            elif _is_idle_object(node):
                continue
            elif node.op == "get_attr":
                yield from self._attribute(node)
            else:
                letter = "p" if node.op == "placeholder" else "n"
                # Written before it is named, so that sizes are numbered from left to right.
                kind = self._type(node)
                name = self.names[node] = self._new(letter)
                head = f"{name}: {kind}" if kind else name
                yield head if letter == "p" else f"{head} = {self._call(node)}"

    def _new(self, letter: str) -> str:
        number = self.counts.get(letter, 0)
        self.counts[letter] = number + 1
        return f"{letter}{number}"

    def _attribute(self, node: fx.Node) -> Iterator[str]:
        """A constant or a nested graph, once for each attribute."""
        target = str(node.target)
        known = self.attributes.get(target)
        if known is not None:
            self.names[node] = known
            return
        value = _attribute_value(node)
        nested = isinstance(value, fx.GraphModule)
        name = self.names[node] = self.attributes[target] = self._new("g" if nested else "c")
        if isinstance(value, fx.GraphModule):
            yield f"{name}:"
            for line in _Writer(self.symbols).lines(value.graph):
                yield f"    {line}"
        else:
            shown = node.meta.get("val", value)
            yield f"{name}: {self._type_of(shown)} = constant"

    def _type(self, node: fx.Node) -> str:
        """What a node yields; "" if unknown, or shown where its parts are taken out."""
        if "val" not in node.meta:
            return ""
        value = node.meta["val"]
        if isinstance(value, (list, tuple)) and node.users and all(map(_is_item, node.users)):
            return ""
        return self._type_of(value)

    def _type_of(self, value: object) -> str:
        if isinstance(value, torch.Tensor):
            dtype = _DTYPES.get(value.dtype, _plain(value.dtype))
            return f"{dtype}[{', '.join(map(self._value, value.shape))}]"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"Sym({self._value(value)})"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(self._type_of, value))})"
        if value is None or isinstance(value, (bool, int, float, str)):
            return type(value).__name__.removesuffix("Type")
        return "object"

    def _call(self, node: fx.Node) -> str:
        """The right-hand side of a node's line."""
        if node.op == "call_method":
            return f"{self._value(node.args[0])}.{node.target}({self._arguments(node, 1)})"
        if node.op == "call_module":
            return f"module({self._arguments(node)})"
        if node.target is operator.getitem:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        assert callable(node.target)
        return f"{_op_name(node.target)}({self._arguments(node)})"

    def _arguments(self, node: fx.Node, first: int = 0) -> str:
        args, kwargs = _without_defaults(node)
        given = [self._value(arg) for arg in args[first:]]
        given += [f"{name}={self._value(value)}" for name, value in kwargs.items()]
        return ", ".join(given)

    def _value(self, value: object) -> str:
        """An argument as text; an object of an unknown kind only by its type."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.symbols.text(value.node.expr)
        if isinstance(value, float):
            return f"{value:.6g}"
        if value is None or value is Ellipsis or isinstance(value, (bool, int, str)):
            return repr(value) if value is not Ellipsis else "..."
        if isinstance(value, (list, torch.Size)):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, tuple):
            comma = "," if len(value) == 1 else ""
            return f"({', '.join(map(self._value, value))}{comma})"
        if isinstance(value, dict):
            items = (f"{self._value(k)}: {self._value(v)}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._value, parts))})"
        return _object_text(value)


def _is_idle_object(node: object) -> bool:
    """True for an input that holds no tensor or number, and that no op reads.

    From torch 2.12 on, DTensor's device mesh is such an input, and is handed on to the backward
    graph; in earlier releases it isn't there.
    """
    if not isinstance(node, fx.Node) or node.op != "placeholder" or "val" not in node.meta:
        return False
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, str)
    value = node.meta["val"]
    if value is None or isinstance(value, (*known, list, tuple)):
        return False
    return all(user.op == "output" for user in node.users)


def _without_idle_objects(results: object) -> object:
    if not isinstance(results, (list, tuple)):
        return results
    return type(results)(value for value in results if not _is_idle_object(value))


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _attribute_value(node: fx.Node) -> object:
    """What a get_attr node stands for; None if its graph belongs to no module."""
    value: object = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def _op_name(target: Callable[..., Any]) -> str:
    """ "aten.add.Tensor", "aten.reshape", "operator.mul", "cond"."""
    if isinstance(target, torch._ops.OpOverload):
        overload = str(target).removesuffix(".default")
        return _SAME.get(overload, overload)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if not isinstance(name, str):
        return type(target).__name__
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target.__name__)
    module = str(getattr(target, "__module__", None) or "").removeprefix("_")
    return f"{module}.{name}" if module else name


def _without_defaults(node: fx.Node) -> tuple[Sequence[object], Mapping[str, object]]:
    """The arguments that differ from their defaults: leading ones by position, as given.

    Those of our own op after the first are written with their names.
    """
    args, kwargs = list(node.args), dict(node.kwargs)
    if not isinstance(node.target, torch._ops.OpOverload):
        return args, kwargs
    schema = node.target._schema.arguments
    own = str(node.target).startswith(_OWN_OP)
    if own:
        named = zip(schema[1:], args[1:], strict=False)
        kwargs = {**{argument.name: value for argument, value in named}, **kwargs}
        del args[1:]
    while args and _is_default(schema[len(args) - 1], args[-1]):
        del args[-1]
    shown = {}
    for argument in schema:
        if argument.name not in kwargs:
            continue
        value = kwargs[argument.name]
        hidden = own and (value is None or argument.name in _OWN_HIDDEN)
        if not hidden and not _is_default(argument, value):
            shown[argument.name] = value
    return args, shown


def _is_default(argument: torch.Argument, value: object) -> bool:
    if isinstance(value, fx.Node) or not argument.has_default_value():
        return False
    default = argument.default_value
    return type(value) is type(default) and bool(value == default)


def _object_text(value: object) -> str:
    """A dtype, device, process group or the like, in its plain form."""
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, _plain(value))
    if isinstance(value, (torch.layout, torch.memory_format)):
        return _plain(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, enum.Enum):
        return str(value.name)
    # From 2.15 on, collectives may hold these in place of strings.
    kind = type(value).__name__
    if kind in ("ReduceOp", "RedOpType"):
        return repr(str(value).rpartition(".")[2].rstrip(">").lower())
    group = getattr(value, "group_name", None)
    return repr(group) if isinstance(group, str) else kind


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")

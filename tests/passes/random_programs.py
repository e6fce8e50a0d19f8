"""Random programs as data: what a program is, and the tools that write one line by line.

A program is the text of a Python function over named tensors, with the sizes of its inputs and
what is expected of each all_reduce in it. The same text is traced, run in eager, compiled, and
printed where something is wrong with it.
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

DTYPES: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "bool": torch.bool,
}
_NAME: Final = re.compile(r"\b[av]\d+\b")
Option = TypeVar("Option")


@dataclass(frozen=True)
class Input:
    """One tensor the program is given.

    Attributes:
        name: Its name in the text.
        dims: Its sizes; a string is the name of a size that may be dynamic.
        dtype: A key of DTYPES.
        role: "part" differs from rank to rank, "shared" doesn't; "keep" is a mask of the
            tokens to keep; "tangent" is a part that stands for an incoming gradient.
        scale: What its values are multiplied by.
    """

    name: str
    dims: tuple[int | str, ...]
    dtype: str
    role: str = "part"
    scale: float = 1.0


@dataclass(frozen=True)
class Value:
    """A tensor of the program; `str()` is its name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return self.name


@dataclass
class Site:
    """What is expected of one all_reduce of the program.

    Attributes:
        allowed: The outcomes that are right: "fused", or the value of a Reason.
        tags: The pieces it is made of, to see what a batch of programs covers.
        blind: The fake tensor of what it reduces is taken away.
    """

    allowed: set[str]
    tags: set[str] = field(default_factory=set)
    blind: bool = False


@dataclass(frozen=True)
class Line:
    """One statement; `site` if it is an all_reduce."""

    text: str
    site: Site | None = None

    @property
    def target(self) -> str:
        """The names that are assigned."""
        left, equals, _ = self.text.partition(" = ")
        return left if equals else ""

    @property
    def reads(self) -> set[str]:
        """The names that are read."""
        left, equals, right = self.text.partition(" = ")
        return set(_NAME.findall(right if equals else left))


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        inputs: Its arguments.
        lines: Its statements.
        outputs: The names it returns.
        sizes: The sizes that the inputs' dims name.
        mode: "static", "dynamic" (token counts symbolic), "marked" (each its own symbol),
            "unbacked" (decided by data) or "hidden" (the hidden size symbolic).
        settings: Keyword options of the pass.
        disabled: The pass runs switched off.
        functional: In-place writes are functionalized before the pass.
        decomposed: Traced through Inductor's decompositions, else through none.
        values: "normal", "integers" (small, so that sums are exact) or "special" (with NaN,
            infinities and zeros of both signs among them).
    """

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, int]
    mode: str = "static"
    settings: Mapping[str, Any] = field(default_factory=dict)
    disabled: bool = False
    functional: bool = True
    decomposed: bool = True
    values: str = "normal"

    @property
    def sites(self) -> list[Site]:
        """The all_reduces in program order."""
        return [line.site for line in self.lines if line.site is not None]

    def source(self) -> str:
        """The text of the function `program`."""
        names = ", ".join(given.name for given in self.inputs)
        body = [*(line.text for line in self.lines), f"return ({', '.join(self.outputs)},)"]
        return f"def program({names}):\n" + "".join(f"    {line}\n" for line in body)

    def function(self, names: Mapping[str, Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The program as a function, its text run among `names`."""
        namespace = dict(names)
        exec(compile(self.source(), "<random program>", "exec"), namespace)
        made: Callable[..., tuple[torch.Tensor, ...]] = namespace["program"]
        return made

    def shape(self, given: Input, more_tokens: int = 0) -> tuple[int, ...]:
        """An input's sizes; with more tokens than traced with, if asked for."""
        return tuple(
            self.sizes[dim] + more_tokens if isinstance(dim, str) else dim for dim in given.dims
        )

    def tensors(self, seed: int, rank: int, more_tokens: int = 0) -> list[torch.Tensor]:
        """This rank's inputs."""
        return [
            self._tensor(index, self.shape(given, more_tokens), seed, rank)
            for index, given in enumerate(self.inputs)
        ]

    def _tensor(self, index: int, shape: tuple[int, ...], seed: int, rank: int) -> torch.Tensor:
        given = self.inputs[index]
        own = rank + 1 if given.role in ("part", "tangent") else 0
        generator = torch.Generator().manual_seed((seed * 64 + index) * 4 + own)
        if given.role == "keep":
            return torch.arange(math.prod(shape)).view(shape) % 3 != 1
        if self.values == "integers":
            values = torch.randint(-3, 4, shape, generator=generator).float()
            values = values if shape else values.abs() + 1
        else:
            values = torch.randn(shape, generator=generator)
            values = values if shape else values.abs() + 0.5
        if self.values == "special" and own == 2 and values.dim() > 1:
            odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-30, 60000.0])
            places = torch.randperm(values.numel(), generator=generator)[: len(odd)]
            values.view(-1)[places] = odd[: len(places)]
        return (values * given.scale).to(DTYPES[given.dtype])

    def dtype_text(self) -> str:
        """The inputs as comments, for a report."""
        return "".join(
            f"# {i.name}: {i.dtype}{list(self.shape(i))} {i.role}\n" for i in self.inputs
        )

    def __str__(self) -> str:
        """The whole program for a report: inputs, options, text, expectations."""
        options = ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name in ("mode", "settings", "disabled", "functional", "decomposed", "values")
        )
        expected = "".join(
            f"# site {n}: {' | '.join(sorted(site.allowed))}\n"
            for n, site in enumerate(self.sites)
        )
        return f"# {options}\n{self.dtype_text()}{self.source()}{expected}"


class Writer:
    """Writes a program: draws from `rng`, names values, keeps lines in order."""

    def __init__(self, rng: random.Random) -> None:
        """Draw everything from `rng`; the first of several options is the plainest."""
        self.rng = rng
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.values: dict[str, Value] = {}
        self.sizes: dict[str, int] = {}

    def pick(self, options: Mapping[Option, float]) -> Option:
        """One of the options, by weight."""
        point = self.rng.random() * sum(options.values())
        for option, weight in options.items():
            point -= weight
            if point < 0:
                return option
        return list(options)[-1]

    def one_of(self, *options: Option) -> Option:
        """One of the options, all equally likely."""
        return options[int(self.rng.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() >= 1 - probability

    def given(
        self, dims: tuple[int | str, ...], dtype: str, role: str = "part", scale: float = 1.0
    ) -> Value:
        """A new input."""
        name = f"a{len(self.inputs)}"
        self.inputs.append(Input(name, dims, dtype, role, scale))
        shape = tuple(self.sizes[dim] if isinstance(dim, str) else dim for dim in dims)
        return self._named(name, shape, dtype)

    def let(
        self,
        text: str,
        shape: tuple[int, ...],
        dtype: str,
        site: Site | None = None,
    ) -> Value:
        """A line that assigns a new value."""
        name = f"v{len(self.values)}"
        self.lines.append(Line(f"{name} = {text}", site))
        return self._named(name, shape, dtype)

    def let_two(self, text: str, shape: tuple[int, ...], dtype: str) -> tuple[Value, Value]:
        """A line that assigns two new values of one shape and dtype."""
        first, second = (f"v{len(self.values) + index}" for index in (0, 1))
        self.lines.append(Line(f"{first}, {second} = {text}"))
        return self._named(first, shape, dtype), self._named(second, shape, dtype)

    def _named(self, name: str, shape: tuple[int, ...], dtype: str) -> Value:
        value = self.values[name] = Value(name, shape, dtype)
        return value

    def unread(self) -> list[str]:
        """The assigned names that no line reads, in order."""
        read = {name for line in self.lines for name in line.reads}
        assigned = [name for line in self.lines for name in _NAME.findall(line.target)]
        return [name for name in assigned if name not in read]

    def shuffle(self) -> None:
        """Put the lines in another order that is as good: each after what it reads."""
        waiting = list(self.lines)
        done = {given.name for given in self.inputs}
        ordered: list[Line] = []
        while waiting:
            ready = [line for line in waiting if line.reads <= done]
            line = ready[int(self.rng.random() * len(ready))]
            waiting.remove(line)
            ordered.append(line)
            done |= set(_NAME.findall(line.target))
        self.lines = ordered


def promoted(*dtypes: str) -> str:
    """The dtype that torch gives the sum of tensors of these dtypes."""
    result = DTYPES[dtypes[0]]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, DTYPES[dtype])
    return next(name for name, dtype in DTYPES.items() if dtype is result)


def written(text: str, allowed: str = "", **inputs: str) -> Program:
    """A program written by hand.

    Args:
        text: Its statements, the last of them `return ...`.
        allowed: The right outcomes, one word for each all_reduce; "a|b" allows both.
        inputs: For each argument its dtype and dims, "bf16[4, 64]" or "bf16[T=4, 64]" for a
            dynamic size; a leading "shared " makes it equal on all ranks. A bool one keeps
            two of three tokens.
    """
    given, sizes = [], {}
    for name, described in inputs.items():
        rest = described.removeprefix("shared ")
        dtype, _, dims = rest.rstrip("]").partition("[")
        sizes_of: list[int | str] = []
        for dim in filter(None, dims.split(", ")):
            symbol, equals, size = dim.rpartition("=")
            if equals:
                sizes[symbol] = int(size)
            sizes_of.append(symbol if equals else int(size))
        kind = "keep" if dtype == "bool" else "shared" if rest != described else "part"
        given.append(Input(name, tuple(sizes_of), dtype, kind))
    *body, last = (line.strip() for line in text.strip().splitlines())
    sites = iter([Site(set(word.split("|"))) for word in allowed.split()])
    reduces = ("all_reduce(", "sum_ranks(")
    lines = [
        Line(line, next(sites) if any(name in line for name in reduces) else None)
        for line in body
    ]
    returned = ast.parse(f"({last.removeprefix('return ')},)", mode="eval").body
    assert isinstance(returned, ast.Tuple)
    outputs = tuple(map(ast.unparse, returned.elts))
    mode = "hidden" if "H" in sizes else "dynamic" if sizes else "static"
    return Program(tuple(given), tuple(lines), outputs, sizes, mode=mode)

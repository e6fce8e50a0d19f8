"""What a report keeps of a graph beside the decisions: its text, and an excerpt around each site.

Plain data, standard library alone. `FusionReport.save` draws pictures and writes `repro.py`
from it. It stays in the process that compiled: neither the JSON form of a report nor torch's
compile cache holds it, and it has no part in whether two reports are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Value:
    """A tensor that an excerpt reads or makes.

    Attributes:
        name: A Python identifier, unique in its excerpt.
        dtype: "bfloat16"; "" for what is no tensor.
        shape: The sizes; those the compiler doesn't know are strings.
        device: "cpu", "cuda".
        sizes: The shape with the sizes of the compiled call in place of unknown ones.
        strides: In elements, of that call.
    """

    name: str
    dtype: str = ""
    shape: tuple[int | str, ...] = ()
    device: str = ""
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    """One op of an excerpt.

    Attributes:
        value: What it makes; of a tuple, the first tensor that holds something.
        op: Its name, "aten.add.Tensor".
        code: Python that computes it, "torch.ops.aten.add.Tensor(x, residual)"; "" if it
            can't be written out.
        reads: The names it reads, each once.
        label: A short name for pictures, "add", with the number it takes if it takes one.
    """

    value: Value
    op: str
    code: str
    reads: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Excerpt:
    """The part of a graph around one site.

    Attributes:
        inputs: What it reads from the rest of the graph.
        lines: Its ops in program order.
        returns: The names that the rest of the graph reads, or that leave it.
    """

    inputs: tuple[Value, ...]
    lines: tuple[Line, ...]
    returns: tuple[str, ...]


@dataclass(frozen=True)
class SiteRecord:
    """One site: its excerpt as the pass found it and, if it was fused, as the pass left it.

    Attributes:
        before: The excerpt before the pass.
        after: The excerpt after it; None where nothing was changed.
        arch: What was planned for: "cpu", "sm_90", "gfx942".
    """

    before: Excerpt
    after: Excerpt | None = None
    arch: str = ""


@dataclass(frozen=True)
class GraphRecord:
    """What is kept of one graph.

    Attributes:
        sites: One entry for each site of the report, None where none could be made.
        settings: fx_fusion's options that differ from their defaults, `target` left out.
    """

    sites: tuple[SiteRecord | None, ...] = ()
    settings: Mapping[str, str | bool] = field(default_factory=dict)
    _texts: tuple[bytes, bytes] = (b"", b"")

    @property
    def before(self) -> str:
        """The `graph_text` of the graph as the pass found it, "" if it isn't kept."""
        return _unpacked(self._texts[0])

    @property
    def after(self) -> str:
        """The same as the pass left it."""
        return _unpacked(self._texts[1])

    @property
    def text_bytes(self) -> int:
        """The memory that both texts take."""
        return sum(map(len, self._texts))

    def with_texts(self, before: str, after: str) -> GraphRecord:
        """The same record with the graph's texts, compressed to about a tenth."""
        return replace(self, _texts=(_packed(before), _packed(after)))


def _packed(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8"), 1) if text else b""


def _unpacked(data: bytes) -> str:
    return zlib.decompress(data).decode("utf-8") if data else ""

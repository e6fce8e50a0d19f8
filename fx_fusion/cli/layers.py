"""Look at a few of a model's layers in place of all, where it is proved that the rest repeat them.

A transformers model is made twice without weights: whole, and with few layers. Its layers repeat
with a period if their modules agree in classes, shapes, dtypes and settings, and the config's lists
of one entry a layer repeat likewise. Then a report on the short model is drawn out to the whole one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fx_fusion.report import FusionReport, GraphReport, SiteReport
from fx_fusion.report_text import outcome_key

#: The longest period looked for (a model with one full-attention layer in six has 6).
LONGEST_PERIOD: Final = 8
#: Attributes that hold the layer's own number.
_NUMBERS: Final = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index"})
_PLAIN: Final = (int, float, str, bool, type(None), torch.dtype)


@dataclass(frozen=True)
class Repetition:
    """How a model's layers repeat.

    Attributes:
        name: The list of layers, "model.layers".
        layers: How many there are.
        prefix: How many come before those that repeat.
        period: After how many layers they repeat.
        kept: How many a short model needs: the prefix, the first period, two more that must come
            out alike, and the last.
    """

    name: str
    layers: int
    prefix: int
    period: int

    @property
    def kept(self) -> int:
        """See the class."""
        rest = (self.layers - self.prefix) % self.period
        return self.prefix + 3 * self.period + (rest or self.period)


def repetition(model: nn.Module, config: Any) -> Repetition | None:
    """How the layers of a model repeat, None where that can't be shown or saves nothing."""
    layers = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == layers
    ]
    if layers is None or len(lists) != 1:
        return None
    name, stack = lists[0]
    seen = [signature(layer, config) for layer in stack]
    for period in range(1, LONGEST_PERIOD + 1):
        prefix = _prefix([seen, *_per_layer(config, layers).values()], period)
        found = Repetition(name, layers, prefix, period)
        if found.kept < layers:
            return found
    return None


def _prefix(lists: Sequence[Sequence[Any]], period: int) -> int:
    """From which layer on all of the lists repeat with a period."""
    count = len(lists[0])
    start = count - period
    while start > 0 and all(one[start - 1] == one[start - 1 + period] for one in lists):
        start -= 1
    return max(start, 0)


def _per_layer(config: Any, layers: int) -> dict[str, list[Any]]:
    """The config's lists that have one entry a layer."""
    values = vars(config).items()
    return {
        name: list(v) for name, v in values if isinstance(v, (list, tuple)) and len(v) == layers
    }


def shorten(config: Any, found: Repetition) -> None:
    """Give a config fewer layers, in place."""
    for name, values in _per_layer(config, found.layers).items():
        setattr(config, name, values[: found.kept])
    config.num_hidden_layers = found.kept


def agrees(short: nn.Module, whole: nn.Module, config: Any, found: Repetition) -> bool:
    """True if the short model is what the whole one begins with, outside of its layers too."""
    few, all_layers = short.get_submodule(found.name), whole.get_submodule(found.name)
    assert isinstance(few, nn.ModuleList)
    assert isinstance(all_layers, nn.ModuleList)
    if len(few) != found.kept:
        return False
    return all(
        signature(one, config) == signature(other, config)
        for one, other in zip(few, all_layers, strict=False)
    ) and _around(short, found.name) == _around(whole, found.name)


def _around(model: nn.Module, name: str) -> list[tuple[Any, ...]]:
    return [
        (path, type(part))
        for path, part in model.named_modules()
        if not path.startswith(f"{name}.")
    ]


def signature(layer: nn.Module, config: Any) -> list[tuple[Any, ...]]:
    """All that two layers must share to be alike; their own numbers are left out."""
    rows: list[tuple[Any, ...]] = []
    for path, part in layer.named_modules():
        rows.append((path, type(part)))
        for kind, tensors in (("parameter", part._parameters), ("buffer", part._buffers)):
            rows += [(kind, n, _tensor(tensor)) for n, tensor in sorted(tensors.items())]
        for name, value in sorted(vars(part).items()):
            if name in ("_parameters", "_buffers", "_modules") or name in _NUMBERS:
                continue
            rows.append((name, _value(value, config)))
    return rows


def _tensor(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.stride())


def _value(value: Any, config: Any) -> Any:
    """A form of an attribute that is equal only where the attributes are."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if type(value) is type(config):
        return "config"
    if isinstance(value, (list, tuple)):
        return [_value(part, config) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, dict):
        return [(_value(key, config), _value(part, config)) for key, part in value.items()]
    if isinstance(value, functools.partial):
        return [id(value.func), _value(value.args, config), _value(value.keywords, config)]
    return id(value)  # the same function or object, or else not alike


def drawn_out(report: FusionReport, found: Repetition) -> FusionReport | None:
    """The whole model's report from the short one's; None where the repeated layers differ."""
    graphs = [_drawn_out_graph(graph, found) for graph in report.graphs]
    if len(graphs) != 1 or graphs[0] is None:
        return None  # more graphs, as graph breaks make, aren't one a layer for certain
    return dataclasses.replace(report, graphs=(graphs[0],))


def _drawn_out_graph(graph: GraphReport, found: Repetition) -> GraphReport | None:
    numbered = [(_number(site, found.name), site) for site in graph.sites]
    in_layers = [number for number, _ in numbered if number is not None]
    if in_layers != sorted(in_layers) or any(not site.module for site in graph.sites):
        return None
    start = found.prefix + found.period
    middle = _span(numbered, start, start + found.period)
    again = _span(numbered, start + found.period, start + 2 * found.period)
    if not middle or len(middle) != len(again):
        return None
    for one, other in zip(middle, again, strict=True):
        alike = _moved(one, found.name, found.period)
        if outcome_key(alike) != outcome_key(other) or alike.module != other.module:
            return None
    more = found.layers - found.kept
    sites: list[SiteReport] = []
    added = False
    for number, site in numbered:
        if number is not None and number >= start + found.period and not added:
            added = True
            for shift in range(found.period, more + 1, found.period):
                sites += [_moved(copied, found.name, shift) for copied in middle]
        late = number is not None and number >= start + found.period
        sites.append(_moved(site, found.name, more) if late else site)
    return dataclasses.replace(graph, sites=tuple(sites), record=None)


def _span(
    numbered: Sequence[tuple[int | None, SiteReport]], first: int, end: int
) -> list[SiteReport]:
    return [site for number, site in numbered if number is not None and first <= number < end]


def _number(site: SiteReport, name: str) -> int | None:
    """Which layer a site is in, None for one outside."""
    match = re.match(rf"(?:.*\.)?{re.escape(name)}\.(\d+)(?:\.|$)", site.module)
    return int(match[1]) if match else None


def _moved(site: SiteReport, name: str, layers: int) -> SiteReport:
    """The same site some layers on."""
    number = _number(site, name)
    if number is None:
        return site
    old, new = f"{name}.{number}", f"{name}.{number + layers}"
    return dataclasses.replace(site, module=site.module.replace(old, new, 1))

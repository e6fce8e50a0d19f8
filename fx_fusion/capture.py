"""A torch.compile backend that looks: everything up to the pass runs, nothing is lowered or run.

Dynamo, AOTAutograd and Inductor's passes treat a function exactly as in a real compilation,
the user's own custom passes included. What they'd compile is replaced by a stand-in that returns
fake tensors.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import fx

from fx_fusion import compat
from fx_fusion.composite import CompositePass
from fx_fusion.graph_text import graph_text
from fx_fusion.inductor_options import inductor_options, split_options
from fx_fusion.passes import graph_pass
from fx_fusion.passes.graph_pass import FusionPass
from fx_fusion.report import GraphReport
from fx_fusion.settings import FusionSettings

When = Literal["before", "after"]

#: What stands in for a size that only data would tell.
UNKNOWN_SIZE: Final = 2


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that torch.compile would compile.

    Attributes:
        report: What became of its sites; None where the pass was kept from it.
        kind: "inference", "forward" or "backward".
        text: Its `graph_text`, "" unless asked for.
    """

    report: GraphReport | None
    kind: str
    text: str = ""


class Capture:
    """A backend for torch.compile that keeps what it sees."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        text: When | None = None,
    ) -> None:
        """Make a backend.

        Args:
            settings: fx_fusion's options by name; those in `options` hold where not given here.
            mode: As for torch.compile; here it may stand beside `options`.
            options: Inductor's options, and fx_fusion's by name.
            text: Also keep the graphs' text, as the pass finds them or as it leaves them. With
                "before" the pass isn't applied, so that nested graphs show as they were.

        Raises:
            SettingError: An unknown option, setting or mode.
        """
        inductor, ours = split_options(options)
        self._options = inductor_options(inductor, mode=mode, **ours)
        slot = self._options[compat.POST_PASS]
        passes = list(graph_pass.flattened((slot,)))
        given = next(p.settings for p in passes if isinstance(p, FusionPass))
        chosen = FusionSettings.from_dict({**dataclasses.asdict(given), **settings})
        self._pass = _CapturingPass(chosen, text)
        users = tuple(p for p in passes if not isinstance(p, FusionPass))
        self._options[compat.POST_PASS] = CompositePass((*users, self._pass))
        # Folding constants would compute them, and sub-processes would only wait for work.
        self._options.update({"freezing": False, "compile_threads": 1})

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """What has been seen, in the order it would be compiled.

        A nested graph comes before the one that holds it.
        """
        return tuple(self._pass.graphs)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture one graph of Dynamo's, which makes one graph, or two in training."""
        with torch._functorch.config.patch(
            enable_autograd_cache=False,
            enable_remote_autograd_cache=False,
            # Else a backward graph is made only once somebody asks for gradients.
            force_non_lazy_backward_lowering=True,
        ):
            return compat.capture_with_inductor(
                gm, example_inputs, self._options, self._compile
            )

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Take the place of Inductor's compiler for one graph of AOTAutograd's."""
        is_inference = bool(kwargs.get("is_inference"))
        kind = "backward" if kwargs.get("is_backward") else "forward"
        self._pass.kind = "inference" if is_inference else kind
        self._pass.outermost = gm.graph
        # As Inductor does, for deep models.
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))
        run = _stand_in(gm)
        compat.run_post_grad_passes(gm, example_inputs, is_inference)
        self._pass.outermost = None
        return run


class _CapturingPass(FusionPass):
    """Our pass, keeping what it sees to itself.

    Attributes:
        graphs: What it has seen.
        kind: What kind of graph comes next.
        outermost: That graph; the others the pass is called with are nested in it.
    """

    keeps_texts = True

    def __init__(self, settings: FusionSettings, text: When | None) -> None:
        super().__init__(settings)
        self.graphs: list[CapturedGraph] = []
        self.kind = "inference"
        self.outermost: fx.Graph | None = None
        self._text = text

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        """Fuse in place and keep the report, or only look if text is wanted of what is there."""
        del is_inference  # `kind` says more
        report = None
        if self._text != "before":
            report = self._reported(graph, self.kind)
        wanted = self._text is not None and graph is self.outermost
        text = graph_text(graph) if wanted else ""
        self.graphs.append(CapturedGraph(report, self.kind, text))

    __hash__ = FusionPass.__hash__


def _stand_in(gm: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """What is called in place of the compiled graph: new tensors like its results.

    Run under a fake tensor mode, these are fake. Only what the results look like is kept of
    the graph.
    """
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    position = {node: index for index, node in enumerate(placeholders)}
    symbols = [_symbol(node.meta.get("val")) for node in placeholders]
    # An input that is returned is that input; else what the node yields, or a constant.
    results = [
        (position.get(value), value.meta.get("val") if isinstance(value, fx.Node) else value)
        if isinstance(value, fx.Node)
        else (None, value)
        for value in output.args[0]
    ]

    def run(inputs: list[Any]) -> list[Any]:
        sizes = {
            symbol: value
            for symbol, value in zip(symbols, inputs, strict=True)
            if symbol is not None
        }
        given = list(inputs)
        inputs.clear()  # boxed: the caller expects its list to be emptied
        return [
            _like(value, sizes) if index is None else given[index] for index, value in results
        ]

    setattr(run, "_boxed_call", True)  # noqa: B010
    return run


def _symbol(value: object) -> Any:
    """The symbol an input stands for, if it is a size."""
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return expression if expression.is_Symbol else None
    return None


def _like(value: object, sizes: Mapping[Any, int]) -> Any:
    """A tensor or number with the properties of `value`."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            [_number(size, sizes) for size in value.shape],
            [_number(stride, sizes) for stride in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )
    if isinstance(value, torch.SymInt):
        return _number(value, sizes)
    if isinstance(value, torch.SymFloat):
        return float(_number(value, sizes))
    return value


def _number(size: int | torch.SymInt | torch.SymFloat, sizes: Mapping[Any, int]) -> Any:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    known = {symbol: sizes.get(symbol, UNKNOWN_SIZE) for symbol in expression.free_symbols}
    value = expression.xreplace(known)
    return int(value) if isinstance(size, torch.SymInt) else float(value)

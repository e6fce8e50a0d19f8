"""The graphs of a call as stable text, for snapshot tests (made for expecttest)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fx_fusion.errors import DataNeededError, PassFailedError, SettingError
from fx_fusion.report import GRAPH_KINDS, Reason

if TYPE_CHECKING:
    from fx_fusion.capture import When


def graph_snapshot(
    fn: Callable[..., Any],
    *args: Any,
    when: When = "after",
    kind: str | None = None,
    **settings: Any,
) -> str:
    """The graphs torch.compile makes of `fn(*args)`, before or after fx_fusion's pass.

    Nothing is run or lowered, as in `fx_fusion.explain`. The text depends neither on the
    machine nor on torch's own names, see `fx_fusion.graph_text`:

        self.assertExpectedInline(graph_snapshot(block, x, residual), '''...''')

    Args:
        fn: A function, method or nn.Module.
        *args: Its arguments; use `functools.partial` for those by keyword.
        when: "before" shows what the pass is given, "after" what it makes of it.
        kind: Take only graphs of this kind: "inference", "forward" or "backward".
        **settings: As for `fx_fusion.explain`.

    Returns:
        The text of the graph; of several (forward and backward, a graph break) each one under a
        heading such as "graph 1 (forward)".

    Raises:
        SettingError: An unknown option or value.
        DataNeededError: The call can't be followed to its end without the value of a tensor.
        PassFailedError: The pass failed on a graph, so that "after" would show it as it was.
    """
    if when not in ("before", "after"):
        raise SettingError(f"when={when!r} must be 'before' or 'after'.")
    if kind not in (None, *GRAPH_KINDS):
        raise SettingError(f"kind={kind!r} must be one of {', '.join(GRAPH_KINDS)}, or None.")
    # Here, so that the processes `spawn` starts needn't load all of torch's compiler.
    from fx_fusion.explain import captured_call

    capture, incomplete = captured_call(fn, settings, args, {}, when)
    if incomplete:
        raise DataNeededError(
            f"graph_snapshot can't follow the call to its end. {incomplete}; take the snapshot of"
            " a part that doesn't need it."
        )
    failures = [
        site.numbers["error"]
        for graph in capture.graphs
        if graph.report is not None and when == "after"
        for site in graph.report.sites
        if site.reason is Reason.INTERNAL_ERROR
    ]
    if failures:
        raise PassFailedError(
            f"graph_snapshot has no graph to show: fx_fusion's pass failed on it ({failures[0]})"
            " and left it as it was. Please report this with the traceback from the log;"
            ' when="before" shows what the pass was given.'
        )
    graphs = [graph for graph in capture.graphs if graph.text and kind in (None, graph.kind)]
    if len(graphs) == 1:
        return graphs[0].text
    parts = [
        f"graph {index} ({graph.kind})\n{graph.text}"
        for index, graph in enumerate(graphs, start=1)
    ]
    return "\n\n".join(parts)

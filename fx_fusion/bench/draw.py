"""Pictures of the benchmarks' CSV files.

A panel for each hidden size: above, the time against the tokens, both logarithmic; below, how
often faster fx_fusion is. The conditions are the caption.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fx_fusion.bench.results import Line, Panel, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Told apart also by people who see few colours; the first is ours.
_COLOURS: Final = ("#d55e00", "#0072b2", "#7f7f7f", "#009e73", "#cc79a7", "#56b4e9")
_MARKS: Final = ("o", "s", "^", "D", "v", "P")


def draw(picture: Picture) -> Figure:
    """Draw it; needs matplotlib, no display."""
    from matplotlib.figure import Figure

    count = len(picture.panels)
    width = max(6.4, 3.3 * count)
    figure = Figure(figsize=(width, 5.6), layout="constrained")
    axes = figure.subplots(
        2,
        count,
        sharex="col",
        sharey="row",
        squeeze=False,
        gridspec_kw={"height_ratios": (2.2, 1)},
    )
    figure.suptitle(picture.title, fontsize=12, fontweight="bold")
    for column, panel in enumerate(picture.panels):
        above, below = axes[0][column], axes[1][column]
        above.set_title(panel.title, fontsize=9)
        for index, line in enumerate(panel.times):
            _plot(above, line, index)
        above.set_yscale("log")
        for index, line in enumerate(panel.ratios, start=1):
            # a lone ratio is ours; several are told apart by whom ours is compared with
            _plot(below, line, 0 if len(panel.ratios) == 1 else index)
            if len(panel.ratios) == 1:
                _annotate(below, line)
        _axes(above, below, picture, panel, first=column == 0)
    highest = max(y for panel in picture.panels for line in panel.ratios for y in line.y)
    axes[1][0].set_ylim(0, 1.3 * highest)  # room for the figures above the points
    banded = any(line.low for panel in picture.panels for line in panel.times)
    caption = picture.caption + (". Bands: quartiles of the rounds" if banded else "")
    _below(figure, axes[0][0], textwrap.wrap(caption, int(width * 15)))
    _settle(figure)
    return figure


def _settle(figure: Figure) -> None:
    """Lay the panels out once and for all, on round numbers.

    The solver's last bits differ from run to run, and from them a file's bytes would.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = (round(float(v), 4) for v in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))


def _below(figure: Figure, axes: Any, caption: Sequence[str]) -> None:
    """Put the legend, and the caption below it, under the panels."""
    width, height = figure.get_size_inches()
    handles, labels = axes.get_legend_handles_labels()
    per_row = max(1, int(width // 2.2))
    caption_height = (0.1 + 0.13 * len(caption)) / height
    legend_height = (0.1 + 0.2 * -(-len(labels) // per_row)) / height
    used = caption_height + legend_height
    figure.set_layout_engine("constrained", rect=(0, used, 1, 1 - used))
    legend = figure.legend(
        handles,
        labels,
        loc="lower center",
        bbox_to_anchor=(0.5, caption_height),
        ncols=per_row,
        frameon=False,
        fontsize=9,
    )
    legend.set_in_layout(False)  # its room is kept above
    figure.text(
        0.5,
        0.06 / height,
        "\n".join(caption),
        ha="center",
        va="bottom",
        fontsize=7.5,
        color="#555555",
    ).set_in_layout(False)


def _plot(axes: Any, line: Line, index: int) -> None:
    colour = _COLOURS[index % len(_COLOURS)]
    axes.plot(
        line.x,
        line.y,
        label=line.name,
        color=colour,
        marker=_MARKS[index % len(_MARKS)],
        markersize=4.5,
        linewidth=2.2 if index == 0 else 1.3,
        zorder=3 if index == 0 else 2,
    )
    if line.low:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)


def _annotate(axes: Any, line: Line) -> None:
    for x, y in zip(line.x, line.y, strict=True):
        axes.annotate(
            f"{y:.2g}" if y < 10 else f"{y:.0f}",
            (x, y),
            textcoords="offset points",
            xytext=(0, 6),
            ha="center",
            fontsize=8,
        )


def _axes(above: Any, below: Any, picture: Picture, panel: Panel, *, first: bool) -> None:
    from matplotlib.ticker import FixedLocator, LogFormatter, NullLocator, StrMethodFormatter

    measured = sorted({x for line in panel.times for x in line.x})
    below.set_xscale("log")
    below.xaxis.set_major_locator(FixedLocator(measured))
    below.xaxis.set_minor_locator(NullLocator())
    below.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    below.set_xlabel(picture.x_label, fontsize=9)
    below.margins(x=0.08)
    above.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    # where no two powers of ten are seen, the ticks between them are labelled as well
    above.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    if picture.bench != "pass-cost":
        below.axhline(1, color="#999999", linewidth=0.8, linestyle="--")
    for axes in (above, below):
        axes.grid(True, which="major", color="#e5e5e5", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", labelsize=8)
        if not first:
            axes.tick_params(axis="y", which="both", left=False)
        axes.spines[["top", "right"]].set_visible(False)
    if first:
        above.set_ylabel(picture.time_label, fontsize=9)
        below.set_ylabel(picture.ratio_label, fontsize=9)


def save(figure: Figure, path: Path) -> None:
    """Write an .svg, .png or .pdf; the same picture gives the same bytes."""
    import matplotlib as mpl

    # Text stays text in an SVG: small, and a reader can search it.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "fx_fusion"}
    dates = {".svg": "Date", ".pdf": "CreationDate"}
    metadata = {dates[path.suffix]: None} if path.suffix in dates else {}
    with mpl.rc_context(settings):
        figure.savefig(path, metadata=metadata, dpi=150)

"""What the pass decided, as plain data: every all_reduce of a graph, fused or with its reason.

This module is a leaf: it imports nothing but the standard library, so that a report can be
read, stored and compared on a machine without torch. Text and HTML live in `report_text`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fx_fusion.record import GraphRecord

Number = int | float | str | bool


class Reason(enum.Enum):
    """Why an all_reduce was not fused. The value is stable and is what reports store.

    `REMEDIES` holds one sentence for each: what the user can do about it.
    """

    NO_NORM = "no_norm"
    LAYER_NORM = "layer_norm"
    NORM_DIMS = "norm_dims"
    NORM_NOT_UPCAST = "norm_not_upcast"
    NORM_TAKEN = "norm_taken"
    SUM_OF_SQUARES = "sum_of_squares"
    REDUCE_OP = "reduce_op"
    COALESCED = "coalesced"
    RESIDUAL_SHAPE = "residual_shape"
    RESIDUAL_DEPENDS = "residual_depends"
    SUMMED_ALL_REDUCES = "summed_all_reduces"
    CHAINED_ALL_REDUCES = "chained_all_reduces"
    UNSUPPORTED_STEP = "unsupported_step"
    LEAVES_GRAPH = "leaves_graph"
    INPUT_MUTATED = "input_mutated"
    UNKNOWN_SHAPE = "unknown_shape"
    DYNAMIC_HIDDEN_SIZE = "dynamic_hidden_size"
    DTYPE = "dtype"
    DEVICE = "device"
    GROUP_IS_NODE = "group_is_node"
    GROUP_UNKNOWN = "group_unknown"
    GROUP_OF_ONE = "group_of_one"
    GRADIENT = "gradient"
    DISABLED = "disabled"
    KERNEL_UNAVAILABLE = "kernel_unavailable"
    NOT_FASTER = "not_faster"
    INTERNAL_ERROR = "internal_error"


#: One sentence a reason: what it means, then what to do. Shown in reports and in the README.
REMEDIES: Final[Mapping[Reason, str]] = {
    Reason.NO_NORM: (
        "The reduced value reaches no RMSNorm in this graph; nothing to do unless you expected"
        " one, in which case register its op with fx_fusion.register_rms_norm."
    ),
    Reason.LAYER_NORM: (
        "The norm subtracts the mean (LayerNorm); only RMSNorm is fused, so this site stays as"
        " it is."
    ),
    Reason.NORM_DIMS: (
        "The norm must run over the last dimension alone, and that must be the reduced tensor's"
        " own last dimension; normalise after the reshape, or over one dimension."
    ),
    Reason.NORM_NOT_UPCAST: (
        "The mean square is computed below fp32; call .float() on the hidden state before"
        " squaring it, as nn.RMSNorm does."
    ),
    Reason.NORM_TAKEN: (
        "Another all_reduce already owns the norm this one leads to; its reduced value stays a"
        " plain input of that fused site."
    ),
    Reason.SUM_OF_SQUARES: (
        "This all_reduce adds up the norm's own sum of squares (a hidden size sharded over"
        " ranks); keep it, it is not a residual-stream reduction."
    ),
    Reason.REDUCE_OP: 'Only a "sum" is fused; divide after a sum in place of "avg".',
    Reason.COALESCED: (
        "Coalesced all_reduces are left alone; reduce the tensor that feeds the norm by itself."
    ),
    Reason.RESIDUAL_SHAPE: (
        "The residual broadcasts against the reduced tensor; expand it to the same shape first."
    ),
    Reason.RESIDUAL_DEPENDS: (
        "The residual, bias, scale or weight is computed from the reduced value itself, so it"
        " cannot be an input of the fused op."
    ),
    Reason.SUMMED_ALL_REDUCES: (
        "Two reduced values are added before the residual; merge_all_reduces=True adds the"
        " partial sums first and reduces once (one more rounding)."
    ),
    Reason.CHAINED_ALL_REDUCES: (
        "The reduced value goes straight into another all_reduce; only the last one of the"
        " chain can be fused."
    ),
    Reason.UNSUPPORTED_STEP: (
        "An op between the all_reduce and the norm is not one the fused op knows (view, cast,"
        " bias, scalar scale, residual); move it before the all_reduce or after the norm."
    ),
    Reason.LEAVES_GRAPH: (
        "The reduced value leaves the compiled graph before it meets a norm; compile the"
        " all_reduce and the norm together (a graph break or a layer-wise compile parts them)."
    ),
    Reason.INPUT_MUTATED: (
        "An input of the fused op is written in place between the all_reduce and the norm; move"
        " the write before or after both."
    ),
    Reason.UNKNOWN_SHAPE: (
        "A shape or dtype along the chain is unknown to the compiler; run shape propagation on"
        " the graph, or give the custom op in front of it a fake implementation."
    ),
    Reason.DYNAMIC_HIDDEN_SIZE: (
        "The hidden size is symbolic; keep the last dimension static"
        " (torch._dynamo.mark_static(x, -1))."
    ),
    Reason.DTYPE: "The fused op takes float32, float16 and bfloat16; cast before the all_reduce.",
    Reason.DEVICE: (
        "All inputs of a site must live on one CPU, CUDA or HIP device; move them together."
    ),
    Reason.GROUP_IS_NODE: (
        "The process group is computed inside the graph (compile_on_one_rank); turn"
        " compile_on_one_rank off to bake the group's name."
    ),
    Reason.GROUP_UNKNOWN: (
        "No process group of this name exists in this process; create it before compiling."
    ),
    Reason.GROUP_OF_ONE: "The group has one rank, so there is nothing to reduce.",
    Reason.GRADIENT: (
        "A gradient's all_reduce in a backward graph; no norm follows it, and none should."
    ),
    Reason.DISABLED: (
        "fx_fusion is switched off (fx_fusion.disable() or FX_FUSION_DISABLE=1); compile"
        " outside it."
    ),
    Reason.KERNEL_UNAVAILABLE: (
        'The kernel asked for cannot run this site; use kernel="auto", or see the numbers.'
    ),
    Reason.NOT_FASTER: (
        "For this GPU and these sizes no kernel is known to be faster than the graph as it is,"
        ' so it stays; kernel="fx_fusion" fuses it all the same, and `fx-fusion bench kernels`'
        " measures it."
    ),
    Reason.INTERNAL_ERROR: (
        "fx_fusion failed on this graph and left it as it was, so results are unaffected;"
        " please report it with the traceback from the log."
    ),
}

#: The kinds of graph torch.compile makes: one for inference, two for a training step.
GRAPH_KINDS: Final = ("inference", "forward", "backward")


@dataclass(frozen=True)
class SiteReport:
    """One all_reduce of a graph and what became of it.

    Attributes:
        fused: True where the fused op replaced it.
        reason: Why not, or None where `fused`.
        numbers: The values that caused the decision (sizes, dtypes, op names).
        source: The user's line that called it, "model.py:12 in forward", or "".
        module: The path of the nn.Module around it, "layers.0.mlp.down_proj", or "".
        shape: The reduced tensor's shape; symbolic sizes are strings.
        dtype: The reduced tensor's dtype, "bfloat16".
        group: The process group's name; `world_size` its number of ranks, None if unknown.
        norm: The norm it leads to, written as a formula, or "".
        steps: What stands between all_reduce and norm, in order: "view", "cast", "bias",
            "scale", "residual".
        outputs: What the fused op returns: "norm", "residual", "reduced", "rstd".
        kernel: What runs it: "unfused" is the group's own all_reduce, then add and norm.
    """

    fused: bool
    reason: Reason | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)
    source: str = ""
    module: str = ""
    shape: tuple[int | str, ...] = ()
    dtype: str = ""
    group: str = ""
    world_size: int | None = None
    norm: str = ""
    steps: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    kernel: str = ""

    @property
    def remedy(self) -> str:
        """What to do about it, in one sentence; "" where fused."""
        return "" if self.reason is None else REMEDIES[self.reason]

    @property
    def is_gradient(self) -> bool:
        """True for a gradient's all_reduce, which stays out of the headline counts."""
        return self.reason is Reason.GRADIENT

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values; `from_dict` reads them back."""
        data = asdict(self)
        data["reason"] = None if self.reason is None else self.reason.value
        for name in ("shape", "steps", "outputs"):
            data[name] = list(data[name])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SiteReport:
        """Read what `to_dict` wrote."""
        values = dict(data)
        reason = values.get("reason")
        values["reason"] = None if reason is None else Reason(reason)
        for name in ("shape", "steps", "outputs"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


@dataclass(frozen=True)
class GraphReport:
    """The sites of one compiled graph.

    Attributes:
        kind: "inference", "forward" or "backward".
        sites: One entry for every all_reduce, in program order.
        notes: What else the user should know, a sentence each (caching off, a user's pass
            without a uuid).
        record: Excerpts around the sites, for `FusionReport.save`, and the graph's text, which
            compilations keep if FX_FUSION_KEEP_GRAPHS=1; None where the report was read back
            from JSON or from torch's compile cache.
    """

    kind: str = "inference"
    sites: tuple[SiteReport, ...] = ()
    notes: tuple[str, ...] = ()
    record: GraphRecord | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values; `from_dict` reads them back."""
        return {
            "kind": self.kind,
            "sites": [site.to_dict() for site in self.sites],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GraphReport:
        """Read what `to_dict` wrote."""
        return cls(
            kind=data["kind"],
            sites=tuple(SiteReport.from_dict(site) for site in data["sites"]),
            notes=tuple(data.get("notes", ())),
        )


@dataclass(frozen=True)
class FusionReport:
    """What was found and fused, over one or more graphs.

    `reports()` gives one FusionReport a compiled graph; `explain()` gives one for the whole
    call, which may span several graphs.

    Attributes:
        graphs: The graphs, in the order they were compiled.
        incomplete: "" if the whole function was seen; else where and why the view ends.
    """

    graphs: tuple[GraphReport, ...] = ()
    incomplete: str = ""

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """Every all_reduce of every graph, gradients' included, in program order."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    @property
    def site_count(self) -> int:
        """How many all_reduces there are, gradients' left out."""
        return sum(not site.is_gradient for site in self.sites)

    @property
    def fused_count(self) -> int:
        """How many of them were fused."""
        return sum(site.fused for site in self.sites)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all graphs, each once, in order."""
        return tuple(dict.fromkeys(note for graph in self.graphs for note in graph.notes))

    def reasons(self) -> dict[Reason, int]:
        """How many sites each Reason kept unfused."""
        counts: dict[Reason, int] = {}
        for site in self.sites:
            if site.reason is not None:
                counts[site.reason] = counts.get(site.reason, 0) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values; `from_dict` reads them back."""
        return {
            "graphs": [graph.to_dict() for graph in self.graphs],
            "incomplete": self.incomplete,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FusionReport:
        """Read what `to_dict` wrote."""
        return cls(
            graphs=tuple(GraphReport.from_dict(graph) for graph in data["graphs"]),
            incomplete=data.get("incomplete", ""),
        )

    @classmethod
    def merged(cls, reports: Iterable[FusionReport]) -> FusionReport:
        """One report over the graphs of several."""
        reports = tuple(reports)
        return cls(
            graphs=tuple(graph for report in reports for graph in report.graphs),
            incomplete="; ".join(r.incomplete for r in reports if r.incomplete),
        )

    def to_json(self) -> str:
        """`to_dict` as one line of JSON with sorted keys."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> FusionReport:
        """Read what `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the report into a folder: a page for the browser, and files for programs.

        `index.html` opens from disk and loads nothing else; `report.json` is `to_json()`;
        `before.txt` and `after.txt` are the graphs' text; `repro.py` builds each distinct
        site with the recorded shapes under a fake group, and explains it.

        Args:
            folder: Made if it doesn't exist.
            overwrite: Write into a folder that holds other files too.

        Returns:
            The path of index.html.

        Raises:
            SaveError: The folder holds files and `overwrite` is False, or it can't be written.
        """
        from fx_fusion.report_files import save_report

        return save_report(self, Path(folder), overwrite=overwrite)

    def __str__(self) -> str:
        """The report as text: the answer first, then a block a site."""
        from fx_fusion.report_text import report_as_text

        return report_as_text(self)

    def _repr_html_(self) -> str:
        """The report as an HTML fragment, for notebooks."""
        from fx_fusion.report_text import report_as_html

        return report_as_html(self)

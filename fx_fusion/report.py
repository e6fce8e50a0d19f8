"""What the pass decided, as plain data: every all_reduce of a graph, fused or with its reason.

This module is a leaf: it imports nothing but the standard library, so that a report can be
read, stored and compared on a machine without torch. Text and HTML live in `report_text`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

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
}

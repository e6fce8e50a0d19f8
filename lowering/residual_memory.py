"""Whether a site may write to its residual's memory, beside what Inductor looks at itself.

Inductor's pass (`torch._inductor.fx_passes.reinplace`) makes sure that nobody reads the residual,
or a view of it, after the site. It doesn't look at what else the site reads, nor at memory that
tensors share only because of how Inductor computes them.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch._inductor import ir
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import statically_known_true

# torch's types are narrower than what is asked here.
_ir: Final = cast(Any, ir)


def may_mutate_residual(node: torch.fx.Node) -> bool:
    """True if the site may write to its residual once nobody else reads that.

    An input of the graph stays as it is, whatever is copied to it later. A residual that the
    site also reads by another name, its x for one, would change while it is read.

    Args:
        node: A call of `ops.with_residual`.
    """
    residual, hidden = node.args[1], node.meta["val"][1]
    assert isinstance(residual, torch.fx.Node)
    value = residual.meta["val"]
    if residual.op in ("placeholder", "get_attr") or value.dtype != hidden.dtype:
        return False
    # the hidden state is contiguous, whatever the residual is
    if value.dim() != hidden.dim() or not all(
        statically_known_true(one == other)
        for one, other in zip(value.stride(), hidden.stride(), strict=True)
    ):
        return False
    others = (node.args[0], *node.args[2:], *node.kwargs.values())
    storage = get_node_storage(residual)
    return all(
        get_node_storage(other) != storage
        for other in others
        if isinstance(other, torch.fx.Node)
    )


def owns_all_its_memory(tensor: Any) -> bool:
    """False for inputs, constants, parts of something larger, and what is made of parts.

    What is joined by `cat` is computed in its place there, and read there by others.

    Args:
        tensor: A realized tensor of Inductor's IR.
    """
    buffer: Any = V.graph.try_get_buffer(tensor.get_name())
    kernel = buffer.inputs[0] if isinstance(buffer, _ir.MultiOutput) else buffer
    is_op = isinstance(getattr(kernel, "op_overload", None), torch._ops.OpOverload)
    computed = (_ir.ComputedBuffer, _ir.ExternKernelOut, _ir.TemplateBuffer)
    if not is_op and not isinstance(buffer, computed):
        return False
    if type(buffer.layout) not in (_ir.FixedLayout, _ir.FlexibleLayout):
        return False
    size = buffer.get_numel()
    return bool(V.graph.sizevars.statically_known_equals(size, tensor.get_numel()))

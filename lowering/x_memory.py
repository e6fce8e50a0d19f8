"""Whether a site may overwrite its x, so that the group's own all_reduce needn't copy it.

The unfused path adds up in x where nobody reads that afterwards, and else in a copy; Inductor
does the same with an all_reduce of its own. Nothing is declared to Inductor, as what isn't read
any more needs no order.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch._inductor.fx_utils import get_node_storage

_aten: Final = cast(Any, torch.ops.aten)
#: What x is computed by. These always get memory of their own from Inductor, while an op that
#: turns out to change nothing may share its input's, which others read.
_GEMMS: Final = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
)
#: What may stand between the GEMM and the site.
_VIEWS: Final = (
    _aten.view.default,
    _aten.reshape.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
)


def may_overwrite_x(node: torch.fx.Node) -> bool:
    """True if x is a GEMM's result, or a view of it, that nobody but the site reads.

    Args:
        node: A call of the op in the graph that is being lowered, x being its first argument.
    """
    reader, one = node, node.args[0]
    while isinstance(one, torch.fx.Node) and set(one.users) == {reader}:
        if one.target in _GEMMS:
            # the site reads it once, as its x
            return sum(value is node.args[0] for value in _values(node)) == 1
        source = one.args[0] if one.args else None
        if one.target not in _VIEWS or not isinstance(source, torch.fx.Node):
            return False
        if get_node_storage(source) != get_node_storage(one):  # a reshape that copied
            return False
        reader, one = one, source
    return False


def _values(node: torch.fx.Node) -> tuple[Any, ...]:
    return (*node.args, *node.kwargs.values())

"""The end of a norm: the weight, and the casts in front of it and behind it.

    normed -> [convert] -> [mul weight | mul (1 + weight)] -> [convert]

Each step is taken only if it is the one way on; the graph's output may read the values in
between (saved for backward), since those are recomputed from what the fused op returns.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fx_fusion.lowering.norm_form import NormForm
from fx_fusion.passes import nodes
from fx_fusion.passes.nodes import aten
from fx_fusion.passes.norm import Norm


def with_tail(norm: Norm) -> Norm:
    """Extend a bare norm over the weight and the casts that follow it."""
    while True:
        step = _tail_step(norm)
        if step is None:
            break
        norm = step
    # a bare cast at the end is the output dtype, not a cast in front of a weight
    if norm.form.weight == "none" and norm.norm_dtype is not None:
        norm = replace(norm, norm_dtype=None)
    cast = "before_weight" if norm.norm_dtype is not None else "after_weight"
    form = NormForm(norm.form.weight, cast, norm.form.reciprocal)  # type: ignore[arg-type]
    return replace(norm, form=form, interior=tuple(sorted(set(norm.interior))))


def _tail_step(norm: Norm) -> Norm | None:
    """The norm with one more node of its tail, or None at its end.

    Other readers are allowed only if they are the graph's output (saved for backward): those
    are recomputed from what the fused op returns.
    """
    steps: list[Norm] = []
    others = 0
    for user in nodes.users_in_order(norm.output):
        step = _cast_step(norm, user) or _weight_step(norm, user)
        if step is not None:
            steps.append(step)
        elif user.op != "output":
            others += 1
    return steps[0] if len(steps) == 1 and others == 0 else None


def _cast_step(norm: Norm, user: fx.Node) -> Norm | None:
    if not nodes.is_cast(user):
        return None
    before, after = nodes.tensor(norm.output), nodes.tensor(user)
    if before is None or after is None or after.dtype not in nodes.DTYPES:
        return None
    if norm.form.weight == "none":
        if norm.norm_dtype is not None or before.dtype is not torch.float32:
            return None
        return replace(
            norm, output=user, norm_dtype=after.dtype, interior=(*norm.interior, user)
        )
    if before.dtype is not torch.float32 or len(norm.output.users) != 1:
        return None
    return replace(norm, output=user, interior=(*norm.interior, user))


def _weight_step(norm: Norm, user: fx.Node) -> Norm | None:
    if norm.form.weight != "none" or not nodes.is_op(user, aten.mul.Tensor):
        return None
    found = nodes.other_operand(user, norm.output)
    value = nodes.tensor(norm.output)
    size = nodes.hidden_size(norm.output)
    if found is None or value is None or size is None:
        return None
    weight = found[0]
    if not isinstance(weight, fx.Node) or not nodes.is_vector(weight, size):
        return None
    base = _under_one_plus(weight)
    kind = "w" if base is None else "1+w"
    source: object = weight if base is None else base
    if base is not None or value.dtype is torch.float32:
        source = nodes.under_widening_cast(source)  # exact: the product is in fp32 anyway
    assert isinstance(source, fx.Node)
    form = NormForm(kind, "after_weight", norm.form.reciprocal)  # type: ignore[arg-type]
    return replace(norm, output=user, weight=source, form=form, interior=(*norm.interior, user))


def _under_one_plus(weight: fx.Node) -> fx.Node | None:
    """The node w of `1 + w` computed in fp32, or None."""
    value = nodes.tensor(weight)
    pair = nodes.operands(weight) if nodes.is_op(weight, nodes.ADDS) else None
    if pair is None or value is None or value.dtype is not torch.float32:
        return None
    base = pair[0] if pair[1] == 1 else pair[1] if pair[0] == 1 else None
    held = nodes.tensor(base)
    if not isinstance(base, fx.Node) or held is None or held.dtype is not torch.float32:
        return None
    return base

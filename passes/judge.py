"""Judge a site: fused, and with what arguments, or the Reason why not.

Pure: a Site, the facts about the process and the settings go in, a Decision comes out. Nothing
here changes a graph, talks to another rank or looks at hardware; `lowering.select` is asked for
the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx

from fx_fusion.lowering.select import Plan, Problem, Refusal, select
from fx_fusion.passes import nodes
from fx_fusion.passes.find_sites import Site
from fx_fusion.passes.form import form_of_site
from fx_fusion.passes.order import Mutations, depends_on
from fx_fusion.passes.outputs import chain_nodes
from fx_fusion.report import Number, Reason
from fx_fusion.settings import FusionSettings

DEVICES: Final = frozenset({"cpu", "cuda", "meta"})


@dataclass(frozen=True)
class Facts:
    """What judging needs to know beside the site.

    Attributes:
        world_size: Gives the size of a group by its name, None if there is no such group.
        arch: The architecture of a device of the graph, "cpu", "sm_90" or "gfx942".
        mutations: The in-place writes of the graph.
        from_gradient: The nodes that depend on an incoming gradient (backward graphs).
        disabled: True if fx_fusion is switched off.
    """

    world_size: Callable[[str], int | None]
    arch: Callable[[torch.device], str]
    mutations: Mutations
    from_gradient: frozenset[fx.Node] = frozenset()
    disabled: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do with a site.

    Attributes:
        plan: The kernel and its constants; None where the site is refused.
        reason: Why it is refused; None where it is fused.
        numbers: The values that caused it.
        world_size: The group's number of ranks, None if unknown.
    """

    plan: Plan | None = None
    reason: Reason | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)
    world_size: int | None = None


def judge(site: Site, facts: Facts, settings: FusionSettings) -> Decision:
    """The one decision about a site. Checks run from the graph's facts to the machine's."""
    world_size = _world_size(site, facts, settings)
    for check in (_switch, _collective, _chain, _group, _norm, _tensors, _order):
        refused = check(site, facts, settings)
        if refused is not None:
            return Decision(
                reason=refused.reason, numbers=refused.numbers, world_size=world_size
            )
    assert world_size is not None
    problem = _problem(site, facts, settings, world_size)
    answer = select(problem, settings)
    if isinstance(answer, Refusal):
        return Decision(reason=answer.reason, numbers=answer.numbers, world_size=world_size)
    return Decision(plan=answer, world_size=world_size)


def _world_size(site: Site, facts: Facts, settings: FusionSettings) -> int | None:
    if settings.target is not None and settings.target.world_size is not None:
        return settings.target.world_size
    return facts.world_size(site.group) if isinstance(site.group, str) else None


def _switch(site: Site, facts: Facts, settings: FusionSettings) -> Refusal | None:
    del site, settings
    return Refusal(Reason.DISABLED, {}) if facts.disabled else None


def _collective(site: Site, facts: Facts, settings: FusionSettings) -> Refusal | None:
    del settings
    if site.norm is None and site.all_reduce in facts.from_gradient:
        return Refusal(Reason.GRADIENT, {})
    if site.stop is not None and site.stop.reason is Reason.COALESCED:
        return Refusal(Reason.COALESCED, site.stop.numbers)
    if not _is_sum(site.reduce_op):
        return Refusal(Reason.REDUCE_OP, {"reduce_op": str(site.reduce_op)})
    return None


def _is_sum(reduce_op: object) -> bool:
    """True for "sum", also where a torch version gives a ReduceOp object."""
    if isinstance(reduce_op, str):
        return reduce_op.lower() == "sum"
    return str(reduce_op) in ("RedOpType.SUM", "ReduceOp.SUM", "<RedOpType.SUM: 0>")


def _group(site: Site, facts: Facts, settings: FusionSettings) -> Refusal | None:
    if isinstance(site.group, fx.Node):
        return Refusal(Reason.GROUP_IS_NODE, {"group": nodes.op_name(site.group)})
    world_size = _world_size(site, facts, settings)
    if not isinstance(site.group, str) or world_size is None:
        return Refusal(Reason.GROUP_UNKNOWN, {"group": str(site.group)})
    if world_size == 1:
        return Refusal(Reason.GROUP_OF_ONE, {"world_size": 1})
    return None


def _chain(site: Site, facts: Facts, settings: FusionSettings) -> Refusal | None:
    del facts, settings
    if site.norm is not None:
        return None
    assert site.stop is not None
    return Refusal(site.stop.reason, site.stop.numbers)


def _norm(site: Site, facts: Facts, settings: FusionSettings) -> Refusal | None:
    """The norm must run in fp32 over the last dimension of the reduced tensor."""
    del facts, settings
    norm = site.norm
    assert norm is not None
    x, hidden = nodes.tensor(site.x), nodes.tensor(norm.hidden)
    if x is None or hidden is None or nodes.tensor(norm.output) is None:
        return Refusal(Reason.UNKNOWN_SHAPE, {"node": norm.hidden.name})
    hidden_size = nodes.hidden_size(norm.hidden)
    if hidden_size is None:
        return Refusal(Reason.DYNAMIC_HIDDEN_SIZE, {"hidden_size": str(hidden.shape[-1])})
    if norm.dims != (-1,) or not nodes.same_size(x.shape[-1], hidden.shape[-1]):
        dims = "unknown" if norm.dims is None else str(list(norm.dims))
        numbers: dict[str, Number] = {"dims": dims, "norm": hidden_size}
        numbers["reduced"] = str(x.shape[-1])
        return Refusal(Reason.NORM_DIMS, numbers)
    if x.dtype not in nodes.DTYPES or hidden.dtype not in nodes.DTYPES:
        return Refusal(Reason.DTYPE, {"reduced": str(x.dtype), "hidden": str(hidden.dtype)})
    if norm.compute_dtype is not torch.float32:
        return Refusal(Reason.NORM_NOT_UPCAST, {"computed_in": str(norm.compute_dtype)})
    return None


def inputs(site: Site) -> Iterator[tuple[str, fx.Node]]:
    """The tensors the fused op would read beside x, with their roles."""
    for step in site.steps:
        if step.value is not None:
            yield step.kind, step.value
    assert site.norm is not None
    named = (
        ("residual", site.norm.residual),
        ("weight", site.norm.weight),
        ("eps", site.norm.eps_node),
    )
    yield from ((role, node) for role, node in named if node is not None)


def _tensors(site: Site, facts: Facts, settings: FusionSettings) -> Refusal | None:
    """Every input must be a known floating-point tensor of the right shape and device."""
    del facts, settings
    x = nodes.tensor(site.x)
    assert x is not None
    if x.device.type not in DEVICES:
        return Refusal(Reason.DEVICE, {"device": str(x.device)})
    cast = site.step("cast")
    target = None if cast is None else nodes.tensor(cast.node)
    if target is not None and target.dtype not in nodes.DTYPES:
        return Refusal(Reason.DTYPE, {"cast": str(target.dtype)})
    for role, node in inputs(site):
        value = nodes.tensor(node)
        if value is None:
            return Refusal(Reason.UNKNOWN_SHAPE, {"node": node.name, "role": role})
        scalar = value.ndim == 0
        if value.device != x.device and not (scalar and value.device.type == "cpu"):
            return Refusal(Reason.DEVICE, {role: str(value.device), "reduced": str(x.device)})
        if not scalar and value.dtype not in nodes.DTYPES:
            return Refusal(Reason.DTYPE, {role: str(value.dtype)})
        if role == "residual" and site.norm is not None and site.norm.residual is node:
            hidden = nodes.tensor(site.norm.hidden)
            if hidden is not None and not nodes.same_shape(value, hidden):
                shapes = {"reduced": str(list(hidden.shape)), role: str(list(value.shape))}
                return Refusal(Reason.RESIDUAL_SHAPE, shapes)
            # an opaque op says what it returns of equal dtypes only
            if hidden is not None and value.dtype != hidden.dtype:
                dtypes = {"hidden": str(hidden.dtype), role: str(value.dtype)}
                return Refusal(Reason.DTYPE, dtypes)
    return None


def _order(site: Site, facts: Facts, settings: FusionSettings) -> Refusal | None:
    """No input may depend on the reduced value, or be written while the chain is computed.

    The fused op reads its inputs together, all_reduce and norm read them where they stand.
    """
    del settings
    assert site.reduced is not None
    for role, node in inputs(site):
        if depends_on(node, site.reduced):
            return Refusal(Reason.RESIDUAL_DEPENDS, {"input": role, "node": node.name})
    if facts.mutations:
        assert site.norm is not None
        assert site.x is not None
        read = [("x", site.x), *inputs(site)]
        read += [("all_reduce", node) for node in chain_nodes(site)]
        for role, node in read:
            write = facts.mutations.between(node, site.all_reduce, site.norm.output)
            if write is not None:
                return Refusal(
                    Reason.INPUT_MUTATED, {"input": role, "by": nodes.op_name(write)}
                )
    return None


def _problem(site: Site, facts: Facts, settings: FusionSettings, world_size: int) -> Problem:
    x = nodes.tensor(site.x)
    assert x is not None
    hidden_size = nodes.hidden_size(site.x)
    assert hidden_size is not None
    tokens: int | None = 1
    for size in map(nodes.static_size, x.shape[:-1]):
        tokens = None if tokens is None or size is None else tokens * size
    arch = facts.arch(x.device) if settings.target is None else settings.target.arch
    return Problem(
        hidden_size=hidden_size,
        dtype=x.dtype,
        world_size=world_size,
        arch=arch,
        tokens=tokens,
        deterministic=settings.deterministic,
        form=form_of_site(site),
    )

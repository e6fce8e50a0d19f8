"""Find every all_reduce of a graph and what stands between it and an RMSNorm.

    all_reduce -> wait_tensor -> [view|cast] -> [bias] -> [scale] -> [add residual] -> norm

A site is an all_reduce, whatever becomes of it. `find_sites` walks forward from each one along
the steps the fused op knows; where the walk ends elsewhere it notes why. Reads only, and visits
a bounded number of nodes a site, so its cost is linear in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from torch import fx

from fx_fusion.passes import nodes
from fx_fusion.passes.nodes import aten, c10d
from fx_fusion.passes.norm import Norm
from fx_fusion.passes.order import depends_on
from fx_fusion.passes.registry import opaque_all_reduce
from fx_fusion.passes.stops import Stop, first_stop, stop_at
from fx_fusion.report import Reason

StepKind = Literal["view", "cast", "bias", "scale", "residual"]
#: How far each kind of step has come; a step may only follow one of a lower or equal stage.
_STAGE: Final[Mapping[StepKind, int]] = {
    "view": 0,
    "cast": 0,
    "bias": 1,
    "scale": 2,
    "residual": 3,
}
#: Powers of two up to this one, and their reciprocals, are normal numbers in fp32.
MAX_EXPONENT: Final = 126
#: The longest chain followed; real models have at most six steps.
MAX_STEPS: Final = 12


@dataclass(frozen=True)
class Step:
    """One node between the reduced value and the hidden state.

    `operand` is the index of the other operand in `node.args` (bias, scale or residual), so
    that it is read where it stands now, after earlier rewrites; `factor` is a literal scale.
    """

    kind: StepKind
    node: fx.Node
    operand: int | None = None
    factor: float | None = None

    @property
    def value(self) -> fx.Node | None:
        """The bias, scale or residual node as the graph has it now."""
        value = None if self.operand is None else self.node.args[self.operand]
        return value if isinstance(value, fx.Node) else None


@dataclass(frozen=True)
class Site:
    """One all_reduce, with the chain to its norm or the reason there is none.

    Attributes:
        all_reduce: The collective's node; `reduced` is the node of its ready result.
        x: Its input, this rank's partial sum.
        group: The group's name, a Node where the graph computes it, None if unknown.
        reduce_op: "sum", or whatever the graph says.
        steps: The nodes from the reduced value to the hidden state, in order.
        norm: The norm it leads to, if any; `norm_views` are the views in front of it.
        stop: Why the walk ended, if there is no norm.
    """

    all_reduce: fx.Node
    reduced: fx.Node | None
    x: fx.Node | None
    group: object
    reduce_op: object
    steps: tuple[Step, ...] = ()
    norm_views: tuple[fx.Node, ...] = ()
    norm: Norm | None = None
    stop: Stop | None = None

    @property
    def hidden(self) -> fx.Node | None:
        """The value the norm reads, before any view in front of the norm."""
        return self.steps[-1].node if self.steps else self.reduced

    def step(self, kind: StepKind) -> Step | None:
        """The last step of this kind, if there is one."""
        return next((step for step in reversed(self.steps) if step.kind == kind), None)


@dataclass
class _Walk:
    """The walk from one all_reduce: where it may go, and what stopped it."""

    norms: Mapping[fx.Node, list[Norm]]
    explain: bool = False
    found: list[tuple[tuple[Step, ...], tuple[fx.Node, ...], Norm]] = field(
        default_factory=list
    )
    stops: list[Stop] = field(default_factory=list)


def find_sites(graph: fx.Graph, norms: Iterable[Norm]) -> list[Site]:
    """Every all_reduce of the graph as a Site, in program order; each norm goes to one site."""
    by_hidden: dict[fx.Node, list[Norm]] = {}
    for norm in norms:
        by_hidden.setdefault(norm.hidden, []).append(norm)
        if norm.residual is not None:  # an opaque add-and-norm: the sum commutes
            swapped = replace(norm, hidden=norm.residual, residual=norm.hidden)
            by_hidden.setdefault(norm.residual, []).append(swapped)
    bare = [site for node in graph.nodes if (site := _bare_site(node)) is not None]
    walks = [_walk_from(site, by_hidden) for site in bare]
    return _assigned(bare, walks)


def _bare_site(node: fx.Node) -> Site | None:
    """The collective alone, with what is known of it at once."""
    if nodes.is_op(node, c10d.all_reduce.default):
        x, reduce_op, group = node.args
        assert isinstance(x, fx.Node)
        readers = list(node.users)
        waits = [user for user in readers if nodes.is_op(user, c10d.wait_tensor.default)]
        if len(waits) != 1 or len(readers) != 1:
            stop = Stop(Reason.UNSUPPORTED_STEP, {"op": "all_reduce without one wait_tensor"})
            return Site(node, None, x, group, reduce_op, stop=stop)
        return Site(node, waits[0], x, group, reduce_op)
    if nodes.is_op(node, c10d.all_reduce_coalesced.default):
        tensors = node.args[0]
        count = len(tensors) if isinstance(tensors, (list, tuple)) else 0
        stop = Stop(Reason.COALESCED, {"tensors": count})
        return Site(node, None, None, node.args[2], node.args[1], stop=stop)
    opaque = opaque_all_reduce(node)
    if opaque is not None:
        x, group = opaque
        return Site(node, node, x, group, "sum")
    return None


def _walk_from(site: Site, norms: Mapping[fx.Node, list[Norm]]) -> _Walk:
    walk = _Walk(norms)
    if site.stop is not None:
        walk.stops.append(site.stop)
    elif site.reduced is not None:
        _follow(walk, site.reduced, ())
        if not walk.found:  # go again and look behind every dead end
            walk.explain = True
            _follow(walk, site.reduced, ())
    return walk


def _follow(walk: _Walk, node: fx.Node, steps: tuple[Step, ...]) -> None:
    """Note the norms that read `node`, then go on along each reader the fused op knows."""
    _note_norms(walk, node, steps, ())
    if len(steps) >= MAX_STEPS:
        return
    for user in nodes.users_in_order(node):
        step = _step(node, user, steps)
        if step is not None:
            _follow(walk, user, (*steps, step))
        elif nodes.is_view(user) and _note_view(walk, user, steps):
            continue
        elif walk.explain:
            residual = next((s.value for s in steps if s.kind == "residual"), None)
            stop = stop_at(node, user, residual, walk.norms)
            if stop is not None:
                walk.stops.append(stop)


def _stage(steps: tuple[Step, ...]) -> int:
    return max((_STAGE[step.kind] for step in steps), default=0)


def _note_norms(
    walk: _Walk, node: fx.Node, steps: tuple[Step, ...], views: tuple[fx.Node, ...]
) -> None:
    for norm in walk.norms.get(node, ()):
        if norm.residual is None or (_stage(steps) < 3 and not views):
            walk.found.append((steps, views, norm))


def _note_view(walk: _Walk, view: fx.Node, steps: tuple[Step, ...]) -> bool:
    """Look for a norm behind a view of the hidden state; True if there is one."""
    before = len(walk.found)
    views: tuple[fx.Node, ...] = (view,)
    node = view
    while True:
        _note_norms(walk, node, steps, views)
        following = [user for user in node.users if nodes.is_view(user)]
        if len(following) != 1 or len(views) >= MAX_STEPS:
            return len(walk.found) > before
        node = following[0]
        views = (*views, node)


def _step(node: fx.Node, user: fx.Node, steps: tuple[Step, ...]) -> Step | None:
    """The step `user` is, read from `node`; None if the fused op has no such step here."""
    stage = _stage(steps)
    if nodes.is_view(user):
        return Step("view", user) if stage < 3 else None
    if nodes.is_cast(user):
        first = all(step.kind == "view" for step in steps)
        return Step("cast", user) if first else None
    if nodes.is_op(user, aten.add.Tensor):
        return _add_step(node, user, stage)
    if stage < 2 and (nodes.is_op(user, nodes.MULS) or nodes.is_op(user, nodes.DIVS)):
        return _scale_step(node, user)
    return None


def _add_step(node: fx.Node, user: fx.Node, stage: int) -> Step | None:
    found = nodes.other_operand(user, node)
    value = nodes.tensor(node)
    if found is None or value is None or stage == 3:
        return None
    other, index = found
    held = nodes.tensor(other)
    if held is None:
        return None
    if nodes.same_shape(held, value):
        assert isinstance(other, fx.Node)
        return None if depends_on(other, node) else Step("residual", user, index)
    size = nodes.hidden_size(node) if value.ndim > 1 else None
    if stage == 0 and size is not None and nodes.is_vector(other, size):
        return Step("bias", user, index)
    return None


def _scale_step(node: fx.Node, user: fx.Node) -> Step | None:
    if nodes.is_op(user, nodes.DIVS):
        pair = nodes.operands(user)
        if pair is None or pair[0] is not node or not isinstance(pair[1], (int, float)):
            return None
        # x / c is exactly x * (1 / c) only where 1 / c is exact in fp32: c a power of two
        mantissa, exponent = math.frexp(float(pair[1]))
        exact = abs(mantissa) == 0.5 and abs(exponent) <= MAX_EXPONENT
        return Step("scale", user, factor=1.0 / pair[1]) if exact else None
    found = nodes.other_operand(user, node)
    if found is None or not nodes.is_scalar(found[0]):
        return None
    other, index = found
    if isinstance(other, fx.Node):
        return Step("scale", user, index)
    assert isinstance(other, (int, float))
    return Step("scale", user, factor=float(other))


def _assigned(bare: list[Site], walks: list[_Walk]) -> list[Site]:
    """Give norms to sites: as many as can be, each to the latest all_reduce that reaches it.

    Of two all_reduces that are added and normalised, the earlier one is then the residual. A
    norm may take an all_reduce from another norm that has one left (augmenting paths).
    """
    reach: dict[fx.Node, list[int]] = {}
    for index, walk in enumerate(walks):
        for _, _, norm in walk.found:
            reach.setdefault(norm.output, []).append(index)
    chosen: dict[int, fx.Node] = {}
    for output in sorted(reach):
        _assign(output, reach, chosen, set())
    return [
        _completed(site, walk, chosen.get(index))
        for index, (site, walk) in enumerate(zip(bare, walks, strict=True))
    ]


def _assign(
    output: fx.Node,
    reach: Mapping[fx.Node, list[int]],
    chosen: dict[int, fx.Node],
    tried: set[int],
) -> bool:
    """Find an all_reduce for the norm that ends in `output`; moves others where that helps."""
    for index in sorted(set(reach[output]) - tried, reverse=True):
        tried.add(index)
        if index not in chosen or _assign(chosen[index], reach, chosen, tried):
            chosen[index] = output
            return True
    return False


def _completed(site: Site, walk: _Walk, output: fx.Node | None) -> Site:
    for steps, views, norm in walk.found:
        if norm.output is output:
            return Site(
                site.all_reduce,
                site.reduced,
                site.x,
                site.group,
                site.reduce_op,
                steps,
                views,
                norm,
            )
    if walk.found:
        taken = Stop(Reason.NORM_TAKEN, {"norm": walk.found[0][2].formula()})
        stop: Stop | None = taken
    else:
        stop = first_stop(walk.stops)
    return Site(site.all_reduce, site.reduced, site.x, site.group, site.reduce_op, stop=stop)

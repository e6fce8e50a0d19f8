"""Sites that must not fuse, each with the Reason that is right for it."""

from __future__ import annotations

from collections.abc import Callable

from random_programs import Line, Site, Value, promoted
from random_sites import SiteWriter


class OddityWriter(SiteWriter):
    """Writes sites that must stay as they are.

    Each method writes one; its values stay apart from the residual stream.
    """

    def oddities(self) -> dict[Callable[[], None], float]:
        """The methods that fit the program so far, with weights."""
        fitting: dict[Callable[[], None], float] = {
            self.no_norm: 1,
            self.layer_norm: 2,
            self.unknown_step: 5,
            self.broadcast_residual: 1.5,
            self.residual_depends: 2.5,
            self.summed: 2,
            self.taken: 1,
            self.chained: 1,
            self.leaves: 1,
            self.sum_of_squares: 1.2,
            self.other_reduction: 1.5,
            self.coalesced: 1.2,
            self.group_of_one: 1,
            self.group_unknown: 1,
            self.other_dtype: 1.5,
            self.unknown_shape: 1,
            self.gradient: 1,
        }
        if len(self.tokens) > 0 and self.mode == "static":
            fitting[self.other_dims] = 1.5
        if self.dtype != "fp32":
            fitting[self.not_upcast] = 1.2
        if self.in_place:
            fitting = {self.overwritten: 1}
        return fitting

    def _reduced(self, *reasons: str, tag: str) -> tuple[Value, Site]:
        site = Site(set(reasons), {tag})
        return self.all_reduce(self.partial(), site), site

    def _hidden(self, *reasons: str, tag: str) -> tuple[Value, Site]:
        """A reduced value with a residual."""
        y, site = self._reduced(*reasons, tag=tag)
        residual = self.like(self.wide(role="shared"), y)
        return self.let(f"{residual} + {y}", y.shape, y.dtype), site

    def no_norm(self) -> None:
        y, _ = self._reduced("no_norm", tag="no norm")
        kind = self.one_of("sum", "matmul", "relu")
        if kind == "matmul":
            matrix = self.given((*self.hidden_dims(), *self.hidden_dims()), y.dtype, "shared")
            self.let(f"{y} @ {matrix}", y.shape, y.dtype)
        elif kind == "sum":
            self.let(f"{y}.sum(0)", y.shape[1:], y.dtype)
        else:
            self.let(f"torch.relu({y})", y.shape, y.dtype)

    def layer_norm(self) -> None:
        hidden, site = self._hidden("layer_norm", tag="LayerNorm")
        if self.chance(0.5):
            weight, bias = (
                self.given((self.hidden_size,), hidden.dtype, "shared") for _ in range(2)
            )
            text = f"F.layer_norm({hidden}, ({self.hidden_size},), {weight}, {bias}, 1e-05)"
            self.let(text, hidden.shape, hidden.dtype)
            return
        upcast = self.cast(hidden, "fp32")
        mean = self.let(f"{upcast}.mean(-1, keepdim=True)", (*hidden.shape[:-1], 1), "fp32")
        centred = self.let(f"{upcast} - {mean}", hidden.shape, "fp32")
        self._by_hand(centred, site)

    def unknown_step(self) -> None:
        """An op between all_reduce and norm that the fused op does not know."""
        y, site = self._reduced("unsupported_step", tag="unknown step")
        residual = self.like(self.wide(role="shared"), y)
        steps = {
            "relu": f"{residual} + torch.relu({y})",
            "dropout": f"{residual} + {y} * ({residual} > 0.5)",
            "alpha": f"torch.add({residual}, {y}, alpha=2)",
            "other alpha": f"torch.add({y}, {residual}, alpha=0.5)",
            "x + x": f"{y} + {y}",
            "third": f"{residual} + {y} / 3",
            "two scales": f"{residual} + ({y} * 0.5) * 3.0",
            "scaled sum": f"({residual} + {y}) * 0.5",
            "difference": f"{residual} - {y}",
            "product": f"{residual} * {y}",
            "zero-dimensional": f"{y} + {residual}.sum()",
        }
        kind = self.one_of(*steps)
        site.tags.add(f"unknown step: {kind}")
        if kind == "zero-dimensional":
            site.allowed.add("residual_shape")
        hidden = self.let(steps[kind], y.shape, y.dtype)
        self.norm(hidden, site)

    def broadcast_residual(self) -> None:
        y, site = self._reduced("residual_shape", tag="broadcast residual")
        dims = (1,) * len(y.shape) if len(y.shape) == 1 else (*([1] * (len(y.shape) - 1)), -1)
        last = self.one_of(self.hidden_size, 1) if len(y.shape) > 1 else 1
        residual = self.given((*dims[:-1], last), y.dtype, "shared")
        if residual.shape == y.shape:
            site.allowed.add("fused")
        self.norm(self.let(f"{y} + {residual}", y.shape, y.dtype), site)

    def residual_depends(self) -> None:
        y, site = self._reduced("residual_depends", tag="input depends on the reduced value")
        kind = self.one_of("residual", "weight", "scale")
        if kind == "residual":
            hidden = self.let(f"{y} + torch.relu({y})", y.shape, y.dtype)
            self.norm(hidden, site)
        elif kind == "scale":
            factor = self.let(f"{y}.mean()", (), y.dtype)
            self.norm(self.let(f"{y} * {factor}", y.shape, y.dtype), site)
        else:
            residual = self.like(self.wide(role="shared"), y)
            hidden = self.let(f"{residual} + {y}", y.shape, y.dtype)
            weight = f"{y}.flatten(0, -2).amax(0)" if len(y.shape) > 1 else f"torch.relu({y})"
            vector = self.let(weight, (self.hidden_size,), y.dtype)
            self.let(
                f"F.rms_norm({hidden}, ({self.hidden_size},), {vector}, 1e-06)",
                y.shape,
                y.dtype,
            )

    def two_reduced(self, first: Site, second: Site) -> tuple[Value, Value]:
        """Two reduced values of one shape."""
        x = self.partial()
        y = self.all_reduce(x, first)
        return y, self.all_reduce(self.like(self.wide(), x), second)

    def summed(self) -> None:
        """Two reduced values and a residual, added."""
        first, second = (Site({"summed_all_reduces"}, {"summed"}) for _ in range(2))
        y, z = self.two_reduced(first, second)
        residual = self.like(self.wide(role="shared"), y)
        if self.chance(0.5):
            second.allowed.add("fused")
            first.allowed.add("fused")  # whichever is added last
            text = f"({residual} + {y}) + {z}"
        else:
            text = f"{residual} + ({y} + {z})"
        self.norm(self.let(text, y.shape, y.dtype), second)

    def taken(self) -> None:
        """Two reduced values, added and normed: the later one takes the norm."""
        first, second = (Site({"fused", "norm_taken"}, {"taken"}) for _ in range(2))
        y, z = self.two_reduced(first, second)
        self.norm(self.let(f"{y} + {z}", y.shape, y.dtype), second)

    def chained(self) -> None:
        y, _ = self._reduced("chained_all_reduces", tag="chained")
        self.site(x=y)

    def leaves(self) -> None:
        if self.chance(0.5):
            self._hidden("leaves_graph", tag="leaves the graph")
        else:
            self._reduced("leaves_graph", tag="leaves the graph")

    def sum_of_squares(self) -> None:
        """The hidden size is spread over the ranks, and with it the norm's sum."""
        site = Site({"sum_of_squares"}, {"sum of squares"})
        x = self.cast(self.partial(), "fp32")
        shape = (*x.shape[:-1], 1)
        total = self.let(f"{x}.pow(2).sum(-1, keepdim=True)", shape, "fp32")
        whole = self.all_reduce(total, site)
        root = self.let(f"torch.rsqrt({whole} / {2 * self.hidden_size} + 1e-05)", shape, "fp32")
        self.let(f"{x} * {root}", x.shape, "fp32")

    def other_reduction(self) -> None:
        site = Site({"reduce_op"}, {"other reduction"})
        y = self.all_reduce(
            self.partial(), site, op=self.one_of("avg", "max", "min", "product")
        )
        self.norm(y, site)

    def coalesced(self) -> None:
        """Two tensors reduced by one collective: one site."""
        site = Site({"coalesced"}, {"coalesced"})
        x = self.partial()
        other = self.like(self.wide(), x)
        text = f'coalesced([{x}, {other}], "sum", WORLD)'
        first, second = self.let_two(text, x.shape, x.dtype)
        self.lines[-1] = Line(self.lines[-1].text, site)
        y, z = (self.let(f"wait({part})", x.shape, x.dtype) for part in (first, second))
        self.norm(self.let(f"{y} + {z}", x.shape, x.dtype), site)

    def group_of_one(self) -> None:
        site = Site({"group_of_one"}, {"group of one"})
        y = self.all_reduce(self.partial(), site, "ONE")
        self.norm(self.steps(y, site, []), site)
        site.allowed = {"group_of_one"}

    def group_unknown(self) -> None:
        site = Site({"group_unknown"}, {"group unknown"})
        x = self.partial()
        y = self.let(f"opaque_all_reduce({x}, NOWHERE)", x.shape, x.dtype, site)
        self.norm(y, site)

    def other_dtype(self) -> None:
        """A dtype that the op does not take, in the reduced tensor or beside it."""
        kind = self.one_of("reduced", "residual", "integers", "output")
        site = Site({"dtype"}, {f"other dtype: {kind}"})
        if kind == "output":  # only the norm's own dtype is a strange one
            y = self.all_reduce(self.partial(), site)
            site.allowed.add("fused")
            self.cast(self.norm(y, site), "fp64")
        elif kind == "reduced":
            y = self.all_reduce(self.partial("fp64"), site)
            self.norm(self.cast(y, self.dtype), site)
        else:
            y = self.all_reduce(self.partial(), site)
            dtype = "fp64" if kind == "residual" else "int32"
            residual = self.like(self.wide(dtype, "shared"), y)
            hidden = self.let(f"{residual} + {y}", y.shape, promoted(dtype, y.dtype))
            self._by_hand(hidden, site)

    def unknown_shape(self) -> None:
        """What is reduced has no fake tensor, as from an op without a fake implementation."""
        site = Site({"unknown_shape"}, {"unknown shape"}, blind=True)
        x = self.wide()
        y = self.all_reduce(self.let(f"torch.relu({x})", x.shape, x.dtype), site)
        residual = self.like(self.wide(role="shared"), y)
        self.norm(self.let(f"{residual} + {y}", y.shape, y.dtype), site)

    def gradient(self) -> None:
        """A gradient's all_reduce, as in a backward graph."""
        site = Site({"gradient"}, {"gradient"})
        x = self.wide(role="tangent")
        y = self.all_reduce(x, site)
        self.let(f"torch.tanh({y})", y.shape, y.dtype)

    def overwritten(self) -> None:
        """An input of the fused op is written while the all_reduce is under way, or later."""
        site = Site({"input_mutated", "fused"}, {"overwritten"})
        x, residual = self.wide(), self.wide(role="shared")
        weight = self.given(self.hidden_dims(), self.dtype, "shared")
        written = Line(f"{self.one_of(x, residual, weight)}.mul_(0.5)")
        place = self.one_of("before the wait", "before the sum", "before the weight", "last")
        site.tags.add(f"overwritten {place}")
        pending = self.let(f'all_reduce({x}, "sum", WORLD)', x.shape, x.dtype, site)
        if place == "before the wait":
            self.lines.append(written)
        y = self.let(f"wait({pending})", x.shape, x.dtype)
        if place == "before the sum":
            self.lines.append(written)
        hidden = self.let(f"{residual} + {y}", y.shape, y.dtype)
        upcast = self.cast(hidden, "fp32")
        root, kind = self.root(upcast, site)
        text = f"{upcast} {'/' if kind == 'sqrt' else '*'} {root}"
        normed = self.cast(self.let(text, y.shape, "fp32"), self.dtype)
        if place == "before the weight":
            self.lines.append(written)
        self.let(f"{weight} * {normed}", y.shape, y.dtype)
        if place == "last":
            self.lines.append(written)

    def other_dims(self) -> None:
        hidden, site = self._hidden("norm_dims", tag="other dims")
        dims = self.one_of("-2", "(-2, -1)", "0")
        upcast = self.cast(hidden, "fp32")
        root, kind = self.root(upcast, site, dims)
        self.let(f"{upcast} {'/' if kind == 'sqrt' else '*'} {root}", hidden.shape, "fp32")

    def not_upcast(self) -> None:
        hidden, site = self._hidden("norm_not_upcast", tag="not upcast")
        root, kind = self.root(hidden, site)
        text = f"{hidden} {'/' if kind == 'sqrt' else '*'} {root}"
        normed = self.let(text, hidden.shape, hidden.dtype)
        weight = self.given((self.hidden_size,), hidden.dtype, "shared")
        self.let(f"{weight} * {normed}", hidden.shape, hidden.dtype)

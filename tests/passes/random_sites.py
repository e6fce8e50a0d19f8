"""Sites that must fuse, as pieces of random programs: partial sum, all_reduce, steps, norm."""

from __future__ import annotations

from random_norms import NormWriter
from random_programs import Site, Value, promoted

#: What may become of sites that reach each other's norms: one of them takes the norm.
SHARED = frozenset({"fused", "norm_taken", "residual_depends"})


class SiteWriter(NormWriter):
    """Writes sites that must fuse.

    Attributes:
        dtype: The dtype of the activations.
        tokens: The dims in front of the hidden size.
        keep: The indices of the tokens that are kept, where data decides how many.
        stream: The residual stream so far.
        normed: The last norm's output.
        exact: Values are integers, so that sums are exact.
        own: For a value that is a reduced one but for steps without a residual, its site.
    """

    dtype: str = "bf16"
    tokens: tuple[int | str, ...] = ()
    exact: bool = False

    def __init__(self, *arguments: object) -> None:
        """Start with an empty program."""
        super().__init__(*arguments)
        self.keep: Value | None = None
        self.stream: Value | None = None
        self.normed: Value | None = None
        self.own: dict[str, Site] = {}
        self.reduced: list[Value] = []

    def wide(self, dtype: str | None = None, role: str = "part") -> Value:
        """A new input of the activations' shape."""
        dims = (*self.tokens, *self.hidden_dims())
        value = self.given(dims, dtype or self.dtype, role)
        if self.keep is not None:
            shape = (*self.keep.shape, self.hidden_size)
            return self.let(f"{value}[{self.keep}]", shape, value.dtype)
        return value

    def like(self, value: Value, other: Value) -> Value:
        """`value` in the shape of `other`."""
        if value.shape == other.shape:
            return value
        text = f"{value}.reshape({other}.shape)"
        if (
            len(other.shape) == 2 and self.mode != "hidden"
        ):  # of a product of symbolic sizes, only the value has one
            text = f"{value}.reshape(-1, {self.hidden_size})"
        return self.let(text, other.shape, value.dtype)

    def partial(self, dtype: str | None = None) -> Value:
        """This rank's partial sum: an input, or computed from the last norm."""
        dtype = dtype or self.dtype
        kinds = {"input": 3.0}
        if self.normed is not None and not self.exact:
            kinds |= {"product": 3, "matmul": 2}
        if self.mode == "static":
            kinds |= {"strided": 0.6}
        kind = self.pick(kinds)
        if kind == "input":
            return self.wide(dtype)
        if kind == "strided":
            dims = (*self.tokens, 2 * self.hidden_size)
            both = self.given(dims, dtype)
            cut = self.one_of(f"[..., : {self.hidden_size}]", "[..., ::2]")
            return self.let(f"{both}{cut}", (*both.shape[:-1], self.hidden_size), dtype)
        assert self.normed is not None
        source = self.normed if self.normed.dtype == dtype else self.cast(self.normed, dtype)
        if kind == "product":
            factor = self.like(self.wide(dtype), source)
            return self.let(f"{source} * {factor}", source.shape, dtype)
        matrix = self.given(
            (*self.hidden_dims(), *self.hidden_dims()), dtype, "part", self.hidden_size**-0.5
        )
        return self.let(f"{source} @ {matrix}", source.shape, dtype)

    def all_reduce(self, x: Value, site: Site, group: str = "WORLD", op: str = "sum") -> Value:
        """The reduced value of `x`, ready."""
        pending = self.let(f'all_reduce({x}, "{op}", {group})', x.shape, x.dtype, site)
        return self.let(f"wait({pending})", x.shape, x.dtype)

    def reduce(self, x: Value, site: Site) -> Value:
        """The reduced value of `x`, by any means that can be fused."""
        kind = self.pick({"WORLD": 10, "PAIR": 1, "opaque": 1})
        site.tags.add(f"all_reduce: {kind}")
        if kind == "opaque":
            y = self.let(f"opaque_all_reduce({x}, WORLD)", x.shape, x.dtype, site)
        else:
            y = self.all_reduce(x, site, kind)
        self.reduced.append(y)
        self.own[y.name] = site
        if self.chance(0.1):
            self.extra_outputs.append(y.name)
            site.tags.add("reduced value returned")
        elif self.chance(0.05):
            self.let(f"torch.relu({y})", y.shape, y.dtype)
            site.tags.add("reduced value read elsewhere")
        return y

    def view(self, value: Value) -> Value:
        """A view that keeps the last dimension."""
        *tokens, size = value.shape
        count = 1
        for token in tokens:
            count *= token
        options: list[tuple[str, tuple[int, ...]]] = [
            (f"{value}.unsqueeze(0)", (1, *value.shape))
        ]
        if tokens:
            options.append((f"{value}.unsqueeze(-2)", (*tokens, 1, size)))
        if self.mode == "marked":  # products of such sizes can't be compared
            tokens = []
        if tokens:
            options.append((f"{value}.flatten(0, -2)", (count, size)))
        if tokens and self.mode != "hidden":
            options.append((f"{value}.view(-1, {size})", (count, size)))
        if 1 in tokens:
            dim = tokens.index(1)
            rest = (*tokens[:dim], *tokens[dim + 1 :], size)
            options.append((f"{value}.squeeze({dim})", rest))
            options.append((f"{value}.squeeze([{dim}])", rest))
        if self.mode == "static" and count % 2 == 0:
            options.append((f"{value}.reshape(2, {count // 2}, {size})", (2, count // 2, size)))
        text, shape = self.one_of(*options)
        return self.let(text, shape, value.dtype)

    def site(self, site: Site | None = None, x: Value | None = None) -> None:
        """A whole site that must fuse, and what reads its results."""
        site = site or Site({"fused"})
        wider = self.dtype != "fp32" and x is None and self.chance(0.06)
        y = self.reduce(x or self.partial("fp32" if wider else None), site)
        if wider or self.chance(0.08):
            target = self.dtype if y.dtype == "fp32" else "fp32"
            y = self._stepped(self.cast(y, target), y, site, "cast")
        if self.chance(0.06):
            y = self._stepped(self.let(f"{y}.clone()", y.shape, y.dtype), y, site, "identity")
        added: list[Value] = []
        hidden = self.steps(y, site, added)
        if not added and hidden.name not in self.own and self.chance(0.04):
            site.tags.add("norm behind a view")
            seen = self.view(hidden)
        else:
            seen = hidden
        post_norm = hidden.name in self.own and self.stream is not None and self.chance(0.5)
        if added and (self.plain or self.chance(0.5)):
            self.normed = added[0]
        else:
            self.normed = self.norm(seen, site)
        if post_norm:
            assert self.stream is not None
            site.tags.add("residual after the norm")
            stream = self.like(self.stream, self.normed)
            dtype = promoted(stream.dtype, self.normed.dtype)
            self.stream = self.let(f"{stream} + {self.normed}", stream.shape, dtype)
        else:
            self.read_again(hidden, site)
            self.stream = hidden

    def _stepped(self, value: Value, before: Value, site: Site, tag: str) -> Value:
        """Note that `value` is one step on from `before`."""
        site.tags.add(tag)
        if before.name in self.own:
            self.own[value.name] = self.own[before.name]
        return value

    def read_again(self, hidden: Value, site: Site) -> None:
        """Other readers of the hidden state beside its norm."""
        if self.chance(0.15):
            self.extra_outputs.append(hidden.name)
            site.tags.add("hidden state returned")
        if self.plain:  # what stays outside a site is compiled to other roundings
            return
        if self.chance(0.08):
            self.let(f"{hidden}.sum(0)", hidden.shape[1:], hidden.dtype)
            site.tags.add("hidden state read elsewhere")
        if self.chance(0.08):
            site.tags.add("two norms on one hidden state")
            self.norm(hidden, site)

    def steps(self, y: Value, site: Site, added: list[Value]) -> Value:
        """What stands between the reduced value and the norm, in the order that is fused.

        If an op adds the residual and normalises, its norm comes into `added`.
        """
        if self.chance(0.25):
            y = self._stepped(self.view(y), y, site, "view")
        # A 1-D bias of a 1-D value is a residual; one of a symbolic size can't be told from it.
        vectors = len(y.shape) > 1 and self.mode != "hidden"
        if vectors and self.chance(0.2):
            bias = self.given(self.hidden_dims(), self.pick({y.dtype: 4, "fp32": 1}), "shared")
            text = self.one_of(f"{y} + {bias}", f"{bias} + {y}")
            dtype = promoted(y.dtype, bias.dtype)
            y = self._stepped(self.let(text, y.shape, dtype), y, site, "bias")
            if self.chance(0.15):
                y = self._stepped(self.view(y), y, site, "view behind bias")
        if self.chance(0.18):
            y = self._stepped(
                self.let(self._scaled(y, site), y.shape, y.dtype), y, site, "scale"
            )
        if self.chance(0.75):
            return self._add_residual(y, site, added)
        site.tags.add("no residual")
        return y

    def _scaled(self, y: Value, site: Site) -> str:
        kind = self.pick({"number": 3, "quotient": 1, "tensor": 2, "cast tensor": 1})
        site.tags.add(f"scale: {kind}")
        if kind == "quotient":
            return f"{y} / {self.one_of(2, 0.25, 1.0 if self.exact else 1024.0)}"
        if kind == "number":
            numbers = (2, 0.5, 4.0) if self.exact else (2, 0.22, 1.0)
            return self.times(y, self.one_of(*numbers))
        factor = self.given((), self.one_of("fp32", "fp64", self.dtype), "shared")
        is_float = factor.dtype == "fp64"
        if kind == "cast tensor":
            factor = self.cast(factor, self.one_of(self.dtype, "fp32"))
        # A float64 one is a Python float that Dynamo made an input: eager has it on the right.
        return f"{y} * {factor}" if is_float else self.times(y, factor)

    def _residual(self, y: Value, site: Site) -> Value:
        kinds = {"input": 2.0}
        if self.stream is not None:
            kinds["stream"] = 6
        if not self.exact:
            kinds["other dtype"] = 1
        others = [value for value in self.reduced if self.own[value.name] is not site]
        if others and not self.plain:
            kinds["reduced"] = 0.7
        kind = self.pick(kinds)
        site.tags.add(f"residual: {kind}")
        if kind == "other dtype":
            residual = self.wide(self.one_of("fp32", "fp16", "bf16"), "shared")
        elif kind == "stream":
            assert self.stream is not None
            residual = self.stream
        elif kind == "reduced":
            residual = self.one_of(*others)
        else:
            residual = self.wide(role="shared")
        if residual.name in self.own:  # the other site reaches this norm too
            site.allowed |= SHARED
            self.own[residual.name].allowed |= SHARED
        return self.like(residual, y)

    def _add_residual(self, y: Value, site: Site, added: list[Value]) -> Value:
        residual = self._residual(y, site)
        dtype = promoted(y.dtype, residual.dtype)
        if residual.dtype == y.dtype and not self.in_place and self.chance(0.08):
            return self._opaque_add(y, residual, site, added)
        text = self.one_of(
            f"{residual} + {y}", f"{y} + {residual}", f"torch.add({y}, {residual})"
        )
        return self.let(text, y.shape, dtype)

    def _opaque_add(self, y: Value, residual: Value, site: Site, added: list[Value]) -> Value:
        """The sum that an opaque add-and-norm op returns."""
        if self.mode == "marked":  # nothing says that the two have equal sizes
            site.allowed.add("residual_shape")
        normed, hidden = self.opaque_add_norm(y, residual, site)
        added.append(normed)
        return hidden

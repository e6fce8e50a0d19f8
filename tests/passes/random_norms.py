"""Every spelling of RMSNorm that the pass must find, as pieces of random programs."""

from __future__ import annotations

from random_programs import DTYPES, Site, Value, Writer, promoted


class NormWriter(Writer):
    """Writes norms.

    Attributes:
        hidden_size: The size of the last dimension.
        mode: As in Program.
        plain: Every site must fuse, whatever comes first.
        in_place: In-place writes are not functionalized, so norms that write are left out.
        extra_outputs: Names to return beside those that nothing reads.
    """

    hidden_size: int = 64
    mode: str = "static"
    in_place: bool = False
    plain: bool = False

    def __init__(self, *arguments: object) -> None:
        """Start with an empty program."""
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.extra_outputs: list[str] = []

    def hidden_dims(self) -> tuple[int | str, ...]:
        """The dims of a vector of the hidden size."""
        return ("H",) if self.mode == "hidden" else (self.hidden_size,)

    def cast(self, value: Value, dtype: str) -> Value:
        """`value` in another dtype."""
        text = f"{value}.float()" if dtype == "fp32" else f"{value}.to({DTYPES[dtype]})"
        return self.let(text, value.shape, dtype)

    def norm(self, hidden: Value, site: Site) -> Value:
        """An RMSNorm of `hidden`, in any spelling; returns the normed value."""
        by_hand = self.in_place or self.chance(0.7)
        family = "by hand" if by_hand else self.one_of("F.rms_norm", "opaque")
        site.tags.add(family)
        if family == "F.rms_norm":
            return self._functional(hidden, site)
        if family == "opaque":
            return self._opaque(hidden, site)
        return self._by_hand(hidden, site)

    def _functional(self, hidden: Value, site: Site) -> Value:
        shape = f"{hidden}.shape[-1:]" if self.mode == "hidden" else f"({self.hidden_size},)"
        weight = "None"
        if self.chance(0.8):
            weight = str(self.given(self.hidden_dims(), hidden.dtype, "shared"))
            if self.chance(0.15):
                weight = str(self.given(self.hidden_dims(), "fp32", "shared"))
        eps = self.pick({"1e-06": 4, "1e-05": 3, "None": 1})
        text = f"F.rms_norm({hidden}, {shape}, {weight}, {eps})"
        return self.let(text, hidden.shape, hidden.dtype)

    def _opaque(self, hidden: Value, site: Site) -> Value:
        op = self.one_of("opaque_rms_norm", "opaque_rounding_rms_norm", "opaque_gemma_rms_norm")
        site.tags.add(op)
        weight = self.given(self.hidden_dims(), hidden.dtype, "shared")
        return self.let(f"{op}({hidden}, {weight}, 1e-05)", hidden.shape, hidden.dtype)

    def opaque_add_norm(self, x: Value, residual: Value, site: Site) -> tuple[Value, Value]:
        """An opaque op that adds the residual and normalises: the norm and the sum."""
        op = self.one_of("opaque_add_rms_norm", "opaque_add_rms_norm_")
        site.tags.add(op)
        weight = self.given(self.hidden_dims(), x.dtype, "shared")
        return self.let_two(f"{op}({x}, {residual}, {weight}, 1e-05)", x.shape, x.dtype)

    def _by_hand(self, hidden: Value, site: Site) -> Value:
        upcast = hidden
        if hidden.dtype != "fp32" or self.chance(0.2):
            upcast = self.cast(hidden, "fp32")
        root, kind = self.root(upcast, site)
        other = upcast
        if hidden.dtype != "fp32" and self.chance(0.06):
            other = hidden
            site.tags.add("product with the value before the upcast")
        text = f"{other} / {root}" if kind == "sqrt" else self.times(other, root)
        normed = self.let(text, hidden.shape, "fp32")
        # Compiled code computes what no result of the op stands for with other roundings.
        readable = not self.plain or kind == "rsqrt"
        if readable and self.chance(0.06):
            self.extra_outputs.append(self.one_of(upcast, root, normed).name)
            site.tags.add("inner value returned")
        elif readable and self.chance(0.04):
            inner = self.one_of(upcast, root, normed)
            self.let(f"torch.relu({inner})", inner.shape, inner.dtype)
            site.tags.add("inner value read")
        return self.tail(normed, hidden.dtype, site)

    def times(self, left: object, right: object) -> str:
        """A product in either order."""
        return self.one_of(f"{left} * {right}", f"{right} * {left}")

    def root(self, upcast: Value, site: Site, dims: str = "-1") -> tuple[Value, str]:
        """The root of the mean square; and how it is spelt: only "sqrt" divides."""
        shape = (*upcast.shape[:-1], 1)
        square = self.pick({"pow": 4, "product": 2, "square": 1})
        site.tags.add(f"square: {square}")
        text = {"pow": "{0}.pow(2)", "product": "{0} * {0}", "square": "torch.square({0})"}
        squared = self.let(text[square].format(upcast), upcast.shape, upcast.dtype)
        plainly = dims != "-1" or self.mode == "hidden"
        mean = "mean" if plainly else self.pick({"mean": 5, "list": 1, "sum": 1})
        site.tags.add(f"mean: {mean}")
        text = {
            "mean": f"{squared}.mean({dims}, keepdim=True)",
            "list": f"{squared}.mean([{dims}], keepdim=True)",
            "sum": f"{squared}.sum({dims}, keepdim=True) / {self.hidden_size}",
        }
        statistic = self.let(text[mean], shape, upcast.dtype)
        statistic = self._plus_eps(statistic, site)
        kind = self.pick(
            {"rsqrt": 5, "pow(-0.5)": 2, "sqrt": 2, "reciprocal of sqrt": 1, "1 / sqrt": 0.5}
        )
        site.tags.add(f"root: {kind}")
        text = {
            "rsqrt": f"torch.rsqrt({statistic})",
            "pow(-0.5)": f"{statistic}.pow(-0.5)",
            "sqrt": f"torch.sqrt({statistic})",
            "reciprocal of sqrt": f"torch.reciprocal(torch.sqrt({statistic}))",
            "1 / sqrt": f"1.0 / torch.sqrt({statistic})",
        }
        root = self.let(text[kind], shape, upcast.dtype)
        return root, kind

    def _plus_eps(self, statistic: Value, site: Site) -> Value:
        kind = self.pick({"number": 12, "tensor": 2, "cast tensor": 1, "none": 1})
        site.tags.add(f"eps: {kind}")
        if kind == "none":
            return statistic
        eps: object = self.one_of(1e-6, 1e-5, 0.01)
        if kind != "number":
            eps = self.given((), self.one_of("fp32", "fp64", "bf16"), "shared", 1e-3)
        if kind == "cast tensor":
            assert isinstance(eps, Value)
            eps = self.cast(eps, self.one_of("fp32", "bf16", "fp64"))
        text = self.one_of(f"{statistic} + {eps}", f"{eps} + {statistic}")
        return self.let(text, statistic.shape, statistic.dtype)

    def tail(self, normed: Value, dtype: str, site: Site) -> Value:
        """The casts and the weight after the division."""
        early = self.chance(0.4)
        kind = self.pick({"w": 6, "none": 1.5, "1+w": 2.5, "low 1+w": 0.5, "late w": 1.5})
        site.tags |= {f"weight: {kind}", "cast before weight" if early else "cast after weight"}
        value = normed
        if early:
            target = dtype if dtype != "fp32" else self.one_of("bf16", "fp16")
            value = self.cast(value, target)
        if kind != "none":
            weight = self._weight(kind, dtype)
            text = self.times(weight, value)
            value = self.let(text, value.shape, promoted(value.dtype, weight.dtype))
        if not early or self.chance(0.3):
            target = self.pick({dtype: 8, "fp32": 1, "fp16": 0.5, "bf16": 0.5})
            if target != value.dtype:
                value = self.cast(value, target)
        return value

    def _weight(self, kind: str, dtype: str) -> Value:
        size = (self.hidden_size,)
        own = self.pick({dtype: 6, "fp32": 3, "fp16": 0.5})
        weight = self.given(self.hidden_dims(), own, "shared")
        if kind == "1+w":
            weight = self.cast(weight, "fp32") if own != "fp32" else weight
            return self.let(self.one_of(f"1 + {weight}", f"{weight} + 1.0"), size, "fp32")
        if kind == "low 1+w":
            return self.let(f"1.0 + {weight}", size, own)
        if kind == "late w":
            return self.let(f"{weight} * 0.5", size, own)
        return weight

"""Programs written by hand to break the pass: traps in scalars and in the norm's spelling.

`sum_ranks(x)` is the ready all_reduce of x over all ranks; `rms(h, w)` an RMSNorm by hand.
"""

from __future__ import annotations

from typing import Final

from random_programs import Program, written

X: Final = "bf16[4, 64]"
SAME: Final = "shared bf16[4, 64]"
W: Final = "shared bf16[64]"
NUMBER: Final = "shared fp32[]"


def _mean_square(value: str, eps: str = "1e-06") -> str:
    return f"({value}.pow(2).mean(-1, keepdim=True) + {eps})"


ROOT: Final = f"torch.rsqrt({_mean_square('f')})"

SCALARS: Final[dict[str, Program]] = {
    "a 0-d scale that is rounded first": written(
        """y = sum_ranks(x)
        h = y * s.to(torch.bfloat16)
        return rms(h, w), h""",
        "fused",
        x=X,
        w=W,
        s=NUMBER,
    ),
    "a 0-d scale on the left, which eager rounds": written(
        """y = sum_ranks(x)
        h = s * y
        return rms(h, w), h""",
        "fused",
        x=X,
        w=W,
        s=NUMBER,
    ),
    "a 0-d scale computed right before its use": written(
        """y = sum_ranks(x)
        t = torch.tanh(s)
        h = t * y
        return rms(h, w), h""",
        "fused",
        x=X,
        w=W,
        s=NUMBER,
    ),
    "a 0-d scale of integers": written(
        """y = sum_ranks(x)
        h = y * s.to(torch.int32)
        return rms(h, w), h""",
        "fused|dtype|unsupported_step",
        x=X,
        w=W,
        s=NUMBER,
    ),
    "a 0-d scale of bools": written(
        """y = sum_ranks(x)
        h = y * (s > 0.6)
        return rms(h, w), h""",
        "fused|dtype|unsupported_step",
        x=X,
        w=W,
        s=NUMBER,
    ),
    "a quotient whose reciprocal overflows": written(
        """y = sum_ranks(x)
        h = y / 2.0**-130
        return rms(h, w)""",
        "unsupported_step",
        x="fp32[4, 64]",
        w=W,
    ),
    "a quotient by zero": written(
        """y = sum_ranks(x)
        h = y / 0.0
        return rms(h, w)""",
        "unsupported_step",
        x="fp32[4, 64]",
        w=W,
    ),
    "an infinite scale": written(
        """y = sum_ranks(x)
        h = y * float("inf")
        return rms(h, w), h""",
        "fused|unsupported_step",
        x="fp32[4, 64]",
        w=W,
    ),
    "a scale that is not a number": written(
        """y = sum_ranks(x)
        h = y * float("nan")
        return rms(h, w), h""",
        "fused|unsupported_step",
        x="fp32[4, 64]",
        w=W,
    ),
    "a scale of minus zero": written(
        """y = sum_ranks(x)
        h = y * -0.0
        return rms(h, w), h""",
        "fused",
        x="fp32[4, 64]",
        w=W,
    ),
    "a scale beyond fp32": written(
        """y = sum_ranks(x)
        h = y * 1e300
        return rms(h, w), h""",
        "fused|unsupported_step",
        x="fp32[4, 64]",
        w=W,
    ),
    "a 0-d eps that is rounded first": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return f * torch.rsqrt({_mean_square("f", "s.to(torch.bfloat16)")})""",
        "fused",
        x=X,
        s=NUMBER,
    ),
    "a 0-d eps computed right before its use": written(
        f"""y = sum_ranks(x)
        f = y.float()
        t = torch.tanh(s)
        return f * torch.rsqrt({_mean_square("f", "t")})""",
        "fused",
        x=X,
        s=NUMBER,
    ),
    "a 0-d eps of integers": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return f * torch.rsqrt({_mean_square("f", "s.to(torch.int64)")})""",
        "fused|dtype",
        x=X,
        s=NUMBER,
    ),
    "an eps of one element": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return f * torch.rsqrt({_mean_square("f", "s")})""",
        "no_norm",
        x=X,
        s="shared fp32[1]",
    ),
    "an eps that depends on the reduced value": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return f * torch.rsqrt({_mean_square("f", "f.abs().mean()")})""",
        "residual_depends",
        x=X,
    ),
    "a negative eps, whose root is NaN": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return f * torch.rsqrt({_mean_square("f", "-5.0")})""",
        "fused",
        x=X,
    ),
}

SPELLINGS: Final[dict[str, Program]] = {
    "the reciprocal of a root": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return f * torch.reciprocal(torch.sqrt({_mean_square("f")}))""",
        "fused",
        x="bf16[64, 64]",
    ),
    "one over a root": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return f * (1.0 / torch.sqrt({_mean_square("f")}))""",
        "fused",
        x="bf16[64, 64]",
    ),
    "a number's square has no last dimension": written(
        f"""y = sum_ranks(x)
        f = y.float().sum()
        return f * {ROOT}""",
        "no_norm",
        x=X,
    ),
    "a number that is reduced": written(
        f"""f = sum_ranks(x.float().sum())
        return f * {ROOT}""",
        "no_norm|norm_dims",
        x=X,
    ),
    "upcast twice": written(
        f"""y = sum_ranks(x)
        f = y.float()
        g = y.float()
        return g * {ROOT}""",
        "fused",
        x=X,
    ),
    "squared before the upcast": written(
        """y = sum_ranks(x)
        m = y.pow(2).float().mean(-1, keepdim=True)
        return y.float() * torch.rsqrt(m + 1e-06)""",
        "no_norm|norm_not_upcast",
        x=X,
    ),
    "the statistic of another tensor": written(
        f"""y = sum_ranks(x)
        f = r.float()
        return y.float() * {ROOT}""",
        "no_norm",
        x=X,
        r=SAME,
    ),
    "the mean read elsewhere": written(
        """y = sum_ranks(x)
        f = y.float()
        s = f.pow(2).mean(-1, keepdim=True)
        z = s.sum()
        return f * torch.rsqrt(s + 1e-06), z""",
        "fused",
        x=X,
    ),
    "two norms that share their statistics": written(
        f"""y = sum_ranks(x)
        h = y + r
        f = h.float()
        q = {ROOT}
        return f * q * w, f * q * u, q""",
        "fused",
        x=X,
        r=SAME,
        w=W,
        u=W,
    ),
    "two weights on one normed value": written(
        f"""y = sum_ranks(x)
        f = (y + r).float()
        g = f * {ROOT}
        return g * w, g * u, g""",
        "fused",
        x=X,
        r=SAME,
        w=W,
        u=W,
    ),
    "a weight of two dimensions": written(
        """y = sum_ranks(x)
        return rms(y, w)""",
        "fused",
        x=X,
        w="shared bf16[1, 64]",
    ),
    "a weight that is expanded": written(
        """y = sum_ranks(x)
        return rms(y, w.expand(64))""",
        "fused",
        x=X,
        w="shared bf16[1]",
    ),
    "a norm of a norm": written(
        """y = sum_ranks(x)
        return rms(rms(y, w), w)""",
        "fused",
        x=X,
        w=W,
    ),
    "float64 behind the weight": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return (f * {ROOT} * w).double()""",
        "fused|dtype",
        x=X,
        w=W,
    ),
    "float64 before the weight": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return (f * {ROOT}).double() * w""",
        "fused|dtype",
        x=X,
        w=W,
    ),
    "a norm that is quantised to float8": written(
        f"""y = sum_ranks(x)
        f = y.float()
        return (f * {ROOT} * w).to(torch.float8_e4m3fn).float()""",
        "fused|dtype",
        x=X,
        w=W,
    ),
    "a sum cast to integers": written(
        """y = sum_ranks(x)
        h = y.to(torch.int32) + b
        return rms(h, w)""",
        "dtype",
        x=X,
        w=W,
        b="shared fp32[64]",
    ),
}

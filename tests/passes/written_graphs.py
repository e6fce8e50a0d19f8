"""Programs written by hand to break the pass: traps in the structure and shapes of a graph.

See `written_values` and `written_sites` for the rest, and `random_ops.names` for what the texts may call.
"""

from __future__ import annotations

from typing import Final

from random_programs import Program, written
from written_values import ROOT, SAME, W, X

ORDER: Final[dict[str, Program]] = {
    "the reduced value read early, in another shape, and a weight made late": written(
        """y = sum_ranks(x)
        z = torch.relu(y)
        v = y.view(2, 2, 64)
        u = torch.tanh(w)
        return rms(v, u), z""",
        "fused",
        x=X,
        w=W,
    ),
    "the root read early, behind a view, and a weight made late": written(
        f"""y = sum_ranks(x)
        f = (y + r).view(2, 2, 64).float()
        q = {ROOT}
        z = torch.relu(q)
        u = torch.tanh(w)
        return f * q * u, z""",
        "fused",
        x=X,
        r=SAME,
        w=W,
    ),
}

SHAPES: Final[dict[str, Program]] = {
    "a partial sum that can't be viewed as its sum can": written(
        """y = sum_ranks(x[:, 1])
        return rms(y.view(-1, 64), w)""",
        "fused",
        x="bf16[2, 3, 4, 64]",
        w=W,
    ),
    "a transposed partial sum": written(
        """y = sum_ranks(x.t())
        return rms(y.contiguous().view(2, 2, 64), w)""",
        "fused",
        x="bf16[64, 4]",
        w=W,
    ),
    "branching views of the hidden state, both normed": written(
        """y = sum_ranks(x)
        v = (y + r).unsqueeze(0)
        return rms(v.unsqueeze(0), w), rms(v.view(2, 2, 64), w)""",
        "fused|unsupported_step|norm_dims",
        x=X,
        r=SAME,
        w=W,
    ),
    "a bias wider than what is reduced": written(
        """y = sum_ranks(x)
        return rms(y + w, w)""",
        "residual_shape",
        x="bf16[4, 1]",
        w=W,
    ),
    "dims of equal size swapped in between": written(
        """y = sum_ranks(x)
        return rms(y.t(), w)""",
        "unsupported_step|norm_dims|no_norm",
        x="bf16[64, 64]",
        w=W,
    ),
    "an expanded partial sum": written(
        """y = sum_ranks(x.expand(4, 64))
        return rms(y.view(2, 2, 64), w)""",
        "fused",
        x="bf16[1, 64]",
        w=W,
    ),
    "a transposed residual": written(
        """y = sum_ranks(x)
        h = y + r.t()
        return rms(h, w), h""",
        "fused",
        x=X,
        r="shared bf16[64, 4]",
        w=W,
    ),
    "an expanded residual": written(
        """y = sum_ranks(x)
        h = y + r.expand(4, 64)
        return rms(h, w), h""",
        "fused",
        x=X,
        r="shared bf16[1, 64]",
        w=W,
    ),
    "squeezed in front of the norm, and the root returned": written(
        f"""y = sum_ranks(x)
        f = (y + r).squeeze((0, 1)).float()
        q = {ROOT}
        return f * q, q""",
        "fused",
        x="bf16[1, 1, 4, 64]",
        r="shared bf16[1, 1, 4, 64]",
    ),
    "unsqueezed in front of the norm, and the root returned": written(
        f"""y = sum_ranks(x)
        f = (y + r).unsqueeze(-2).float()
        q = {ROOT}
        return f * q, q""",
        "fused",
        x=X,
        r=SAME,
    ),
    "there and back in the middle": written(
        """y = sum_ranks(x)
        h = y.unsqueeze(0) + r
        c = h.squeeze(0)
        return rms(c, w), h, c""",
        "fused",
        x=X,
        r="shared bf16[1, 4, 64]",
        w=W,
    ),
    "two norms behind two views": written(
        """y = sum_ranks(x)
        h = y + r
        return rms(h.unsqueeze(0), w), rms(h.unsqueeze(1), w)""",
        "fused",
        x=X,
        r=SAME,
        w=W,
    ),
    "a view and a view of it, both normed": written(
        """y = sum_ranks(x)
        a = (y + r).unsqueeze(0)
        b = a.view(2, 2, 64)
        return rms(a, w), rms(b, w), b""",
        "fused",
        x=X,
        r=SAME,
        w=W,
    ),
    "one token, one dimension, and a bias that is a residual": written(
        """y = sum_ranks(x)
        h = y + b
        return rms(h, w), h""",
        "fused",
        x="bf16[64]",
        b=W,
        w=W,
    ),
    "a hidden size of one": written(
        """y = sum_ranks(x)
        h = y + r
        return rms(h, w), h""",
        "fused",
        x="bf16[4, 1]",
        r="shared bf16[4, 1]",
        w="shared bf16[1]",
    ),
    "no tokens": written(
        """y = sum_ranks(x)
        h = y + r
        return rms(h, w), h""",
        "fused",
        x="bf16[0, 64]",
        r="shared bf16[0, 64]",
        w=W,
    ),
}

SYMBOLIC: Final[dict[str, Program]] = {
    "a sum over symbolic tokens that looks like a mean": written(
        """f = sum_ranks(x).float()
        return f * torch.rsqrt(f.pow(2).sum(0, keepdim=True) / 4 + 1e-06)""",
        "norm_dims|no_norm",
        x="bf16[T=4, 64]",
    ),
    "a sum over a symbolic hidden size that looks like a mean": written(
        """f = sum_ranks(x).float()
        return f * torch.rsqrt(f.pow(2).sum(-1, keepdim=True) / 64 + 1e-06)""",
        "dynamic_hidden_size|no_norm",
        x="bf16[4, H=64]",
    ),
    "a sum over unbacked tokens that looks like a mean": written(
        """k = m.nonzero().squeeze(-1)
        f = sum_ranks(x[k]).float()
        return f * torch.rsqrt(f.pow(2).sum(0, keepdim=True) / 4 + 1e-06)""",
        "norm_dims|no_norm",
        m="bool[7]",
        x="bf16[7, 64]",
    ),
    "symbolic tokens there and back": written(
        """y = sum_ranks(x)
        h = (y.unsqueeze(1) + r).squeeze(1)
        return rms(h, w), y""",
        "fused",
        x="bf16[T=4, 64]",
        r="shared bf16[T=4, 1, 64]",
        w=W,
    ),
    "a view by the size of the reduced value": written(
        """y = sum_ranks(x)
        v = y.view(y.shape[0], 1, 64)
        return rms(v + r, w), torch.relu(y), y""",
        "fused",
        x="bf16[T=4, 64]",
        r="shared bf16[T=4, 1, 64]",
        w=W,
    ),
    "a view of unbacked tokens": written(
        """k = m.nonzero().squeeze(-1)
        y = sum_ranks(x[k])
        h = y.view(1, -1, 64) + r[k].unsqueeze(0)
        return rms(h, w), torch.relu(y), y, h""",
        "fused",
        m="bool[7]",
        x="bf16[7, 64]",
        r="shared bf16[7, 64]",
        w=W,
    ),
    "two unbacked counts that must be equal": written(
        """k = m.nonzero().squeeze(-1)
        j = m.nonzero().squeeze(-1)
        y = sum_ranks(x[k])
        h = y + r[j]
        return rms(h, w), y, h""",
        "fused|residual_shape",
        m="bool[7]",
        x="bf16[7, 64]",
        r="shared bf16[7, 64]",
        w=W,
    ),
    "tokens chosen by the reduced value": written(
        """y = sum_ranks(x)
        k = (y.amax(-1) > 0.5).nonzero().squeeze(-1)
        u = sum_ranks(y[k])
        return rms(u.view(-1, 1, 64), w), u""",
        "no_norm|unsupported_step fused",
        x="bf16[7, 64]",
        w=W,
    ),
}


def stream(sites: int) -> Program:
    """A model of many layers: each site's norm feeds the next, along one residual stream."""
    lines = []
    x, residual = "x", "r"
    for layer in range(sites):
        lines.append(f"y{layer} = sum_ranks({x})")
        lines.append(f"h{layer} = {residual} + y{layer}")
        lines.append(f"n{layer} = rms(h{layer}, w)")
        x, residual = f"n{layer}", f"h{layer}"
    text = "\n".join([*lines, f"return {x}, {residual}"])
    return written(text, " ".join(["fused"] * sites), x=X, r=SAME, w=W)


def ladder(sites: int) -> Program:
    """Many all_reduces first, then norms that two of them reach each, in the worst order."""
    lines = [f"y{site} = sum_ranks(x)" for site in range(sites)]
    lines += [f"n{site} = rms(y{site} + y{site - 1}, w)" for site in range(sites - 1, 0, -1)]
    lines.append(f"n0 = rms(y{sites - 1}, w)")
    names = ", ".join(f"n{site}" for site in range(sites))
    allowed = " ".join(["fused|norm_taken|residual_depends"] * sites)
    return written("\n".join([*lines, f"return {names}"]), allowed, x=X, w=W)

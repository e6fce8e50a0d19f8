"""Programs written by hand to break the pass: sites that cross, and opaque norms.

See `written_values` and `written_graphs` for the rest.
"""

from __future__ import annotations

from typing import Final

from random_programs import Program, written
from written_values import SAME, W, X

#: What is right for two sites of which each could be an input of the other's norm.
EITHER: Final = "fused|residual_depends|norm_taken fused|residual_depends|norm_taken"

CROSSED: Final[dict[str, Program]] = {
    "two sums of the same two, each normed": written(
        """y = sum_ranks(x)
        u = sum_ranks(z)
        h = y + u
        g = u + y
        return rms(h, w), rms(g, w), h""",
        EITHER,
        x=X,
        z=X,
        w=W,
    ),
    "weights computed from each other's reduced value": written(
        """y = sum_ranks(x)
        u = sum_ranks(z)
        return rms(y, u.amax(0)), rms(u, y.amax(0))""",
        EITHER,
        x=X,
        z=X,
    ),
    "residuals computed from each other's reduced value": written(
        """y = sum_ranks(x)
        u = sum_ranks(z)
        return rms(y + torch.relu(u), w), rms(u + torch.relu(y), w)""",
        EITHER,
        x=X,
        z=X,
        w=W,
    ),
    "a norm that only one of two can have": written(
        """u = sum_ranks(z)
        y = sum_ranks(x)
        m = rms(u + y, w)
        return rms(y, w), m""",
        "fused fused",
        x=X,
        z=X,
        w=W,
    ),
    "one tensor reduced twice": written(
        """y = sum_ranks(x)
        u = sum_ranks(x)
        return rms(y + u, w)""",
        "norm_taken fused",
        x=X,
        w=W,
    ),
    "the partial sum as the residual": written(
        """y = sum_ranks(x)
        return rms(y + x, w), x""",
        "fused",
        x=X,
        w=W,
    ),
    "one all_reduce waited for twice": written(
        """p = all_reduce(x, "sum", WORLD)
        y = wait(p)
        z = wait(p)
        return rms(y, w), z""",
        "unsupported_step|fused",
        x=X,
        w=W,
    ),
    "weight, bias, scale and residual reduced as well": written(
        """y = sum_ranks(v)
        b = sum_ranks(v * 2)
        s = sum_ranks(v.sum())
        z = sum_ranks(x)
        q = sum_ranks(x * 3)
        return rms((z + b) * s + q, y)""",
        "no_norm|unsupported_step no_norm|residual_shape"
        " no_norm|unsupported_step|residual_shape|residual_depends"
        " norm_taken|fused norm_taken|fused",
        x=X,
        v="bf16[64]",
    ),
    "two chains of one reduced value, both normed": written(
        """y = sum_ranks(x)
        a = y.view(2, 2, 64) * 0.5 + r
        b = y.unsqueeze(0) + q
        return rms(a, w), rms(b, w), y""",
        "fused",
        x=X,
        r="shared bf16[2, 2, 64]",
        q="shared bf16[1, 4, 64]",
        w=W,
    ),
    "everything returned twice": written(
        """y = sum_ranks(x)
        h = y + r
        n = rms(h, w)
        return n, n, h, h, y""",
        "fused",
        x=X,
        r=SAME,
        w=W,
    ),
}

OPAQUE: Final[dict[str, Program]] = {
    "overwriting norms in a row": written(
        """y = sum_ranks(x)
        n, h = opaque_add_rms_norm_(y, r, w, 1e-5)
        m, g = opaque_add_rms_norm_(n, h, w, 1e-5)
        return m, g""",
        "fused",
        x=X,
        r=SAME,
        w=W,
    ),
    "a bias in front of an opaque norm, and read again": written(
        """y = sum_ranks(x)
        z = y + b
        n, h = opaque_add_rms_norm(z, r, w, 1e-5)
        return n, h, z""",
        "fused",
        x=X,
        r=SAME,
        w=W,
        b=W,
    ),
    "both arguments of an opaque norm reduced": written(
        """y = sum_ranks(x)
        u = sum_ranks(z)
        n, h = opaque_add_rms_norm(y, u, w, 1e-5)
        return n, h""",
        "fused|norm_taken fused|norm_taken",
        x=X,
        z=X,
        w=W,
    ),
    "an opaque norm whose residual has another dtype": written(
        """y = sum_ranks(x)
        n, h = opaque_add_rms_norm(y, r, w, 1e-5)
        return n.to(torch.bfloat16), h.to(torch.bfloat16)""",
        "dtype",
        x=X,
        r="shared fp32[4, 64]",
        w=W,
    ),
    "an opaque norm whose residual broadcasts": written(
        """y = sum_ranks(x)
        n, h = opaque_add_rms_norm(y, r, w, 1e-5)
        return n, h""",
        "residual_shape",
        x=X,
        r="shared bf16[1, 64]",
        w=W,
    ),
    "an opaque norm of the sum of a value and itself": written(
        """y = sum_ranks(x)
        n, h = opaque_add_rms_norm(y, y, w, 1e-5)
        return n, h""",
        "residual_depends|no_norm|unsupported_step",
        x=X,
        w=W,
    ),
    "the reduced value as an opaque norm's residual": written(
        """y = sum_ranks(x)
        n, h = opaque_add_rms_norm(r, y, w, 1e-5)
        return n, h""",
        "fused",
        x=X,
        r=SAME,
        w=W,
    ),
}

"""How a graph spells its RMSNorm, as data: the part of the numerics contract that varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weight = Literal["none", "w", "1+w"]
Cast = Literal["before_weight", "after_weight"]
Reciprocal = Literal["rsqrt", "pow", "sqrt", "1/sqrt"]


@dataclass(frozen=True)
class NormForm:
    """One spelling of RMSNorm over the last dimension, computed in fp32.

    With `h32 = hidden.float()` and `s = h32.pow(2).mean(-1, keepdim=True) + eps`:

    * `reciprocal` says how the root is taken: "rsqrt" is `h32 * s.rsqrt()`, "pow" is
      `h32 * s.pow(-0.5)`, "sqrt" is `h32 / s.sqrt()`, "1/sqrt" is `h32 * (1 / s.sqrt())`.
      They differ by an ulp of fp32.
    * `cast` says when the fp32 result is rounded to the activation dtype: "before_weight"
      is `weight * normed.to(dtype)` (Llama), "after_weight" is `(weight * normed).to(dtype)`
      (nn.RMSNorm, OLMo2, gpt-oss).
    * `weight` says what multiplies it: "none", "w", or "1+w" computed in fp32 (Gemma).
    """

    weight: Weight = "w"
    cast: Cast = "after_weight"
    reciprocal: Reciprocal = "rsqrt"

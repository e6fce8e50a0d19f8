"""A report with many outcomes, for the tests of what is saved."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import fx_fusion
from fx_fusion.report import FusionReport
from fx_fusion.testing import fake_group

HIDDEN = 64


def all_reduce(x: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
    chosen = dist.group.WORLD if group is None else group
    return cast(torch.Tensor, cast(Any, funcol).all_reduce(x, op, chosen))


def norm(h: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h, (h.shape[-1],), None, 1e-6)


def many_outcomes(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
    """One site for each of many reasons, and two fused ones from one line."""
    results = []
    for _ in range(2):
        residual = residual + all_reduce(x)
        x = norm(residual) * w
        results.append(x)
        x = x @ x.T @ x
    results.append(F.layer_norm(all_reduce(x * 2), (HIDDEN,)))
    results.append(norm(torch.tanh(all_reduce(x * 3))))
    results.append(norm(all_reduce(x * 4, "avg")))
    results.append(norm(residual + all_reduce(x * 5) + all_reduce(x * 6)))
    results.append(all_reduce(x * 7) @ w)
    results.append(norm(all_reduce(x * 8)[:, None].expand(-1, 4, -1) + residual[:, None]))
    return results, all_reduce(x * 9)


def saved_report() -> FusionReport:
    """The report of `many_outcomes` with a dynamic number of tokens and a transposed residual."""
    with fake_group(8), torch.no_grad():
        x = torch.empty(16, HIDDEN)
        residual = torch.empty(HIDDEN, 16).T
        for tensor in (x, residual):
            torch._dynamo.mark_dynamic(tensor, 0)
        return fx_fusion.explain(many_outcomes)(x, residual, torch.empty(HIDDEN))

"""FlashInfer's and vLLM's ops by schema alone, with plain torch behind them."""

from __future__ import annotations

from typing import Any, Final, cast

import torch

_EPS: Final = 1e-6
_LIBRARIES: list[Any] = []


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, once: bool) -> torch.Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype) if once else normed.to(x.dtype) * weight


def _into(once: bool, offset: float = 0.0) -> Any:
    def run(
        out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float, *_: object
    ) -> None:
        out.copy_(_norm(x, w.float() + offset if offset else w, eps, once=once))

    return run


def _add_into(once: bool) -> Any:
    def run(
        x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float, *_: object
    ) -> None:
        residual.add_(x)
        x.copy_(_norm(residual, w, eps, once=once))

    return run


def _nothing(*_: object) -> None: ...


def define() -> None:
    """Register the stubs, once a process."""
    if _LIBRARIES:
        return
    mutating = (
        (
            "flashinfer",
            "rmsnorm(Tensor(a!) out, Tensor input, Tensor weight, float eps,"
            " bool? enable_pdl=None) -> ()",
            _into(True),
        ),
        (
            "flashinfer",
            "gemma_rmsnorm(Tensor(a!) out, Tensor input, Tensor weight, float eps,"
            " bool? enable_pdl=None) -> ()",
            _into(True, 1.0),
        ),
        (
            "flashinfer",
            "fused_add_rmsnorm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps,"
            " bool? enable_pdl=None) -> ()",
            _add_into(True),
        ),
        (
            "_C",
            "rms_norm(Tensor(a!) result, Tensor input, Tensor weight, float epsilon) -> ()",
            _into(False),
        ),
        (
            "_C",
            "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight,"
            " float epsilon) -> ()",
            _add_into(False),
        ),
    )
    for namespace, schema, run in mutating:
        _define(namespace, schema, run, _nothing)
    _define(
        "vllm_ir",
        "rms_norm(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor",
        lambda x, w, eps, *_: _norm(x, w, eps, once=False),
        lambda x, *_: torch.empty_like(x),
    )
    _define(
        "vllm",
        "all_reduce(Tensor tensor, str group_name) -> Tensor",
        _all_reduce,
        lambda x, _: torch.empty_like(x),
    )


def _all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    import torch.distributed as dist

    assert group_name == "tp:0"
    result = x.clone()
    dist.all_reduce(result)
    return result


def _define(namespace: str, schema: str, run: Any, fake: Any) -> None:
    library = cast(Any, torch.library).Library(namespace, "FRAGMENT")
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, run, "CPU")
    cast(Any, torch.library).register_fake(f"{namespace}::{name}", fake, lib=library)
    _LIBRARIES.append(library)


def into(op: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Call a norm that writes its first argument."""
    out = torch.empty_like(x)
    op(out, x, weight, _EPS)
    return out

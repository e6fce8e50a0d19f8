"""The torch.compile backend "fx_fusion": Inductor with our pass in it.

torch finds it by its entry point: `torch.compile(model, backend="fx_fusion")` needs no import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fx_fusion import compat, switch
from fx_fusion.inductor_options import inductor_options, split_options


def fx_fusion(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph with Inductor, fusing all_reduce + add + RMSNorm.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs, fake or real.
        mode: torch.compile's mode; `options={"mode": ...}` is the same, as torch.compile takes
            only one of the two.
        options: Inductor's options, and fx_fusion's by name (see `FusionSettings`), with
            "fx_fusion." before it or without. The custom pass a user has in `options` or in
            Inductor's config is kept.

    Returns:
        The compiled graph.

    Raises:
        SettingError: An unknown option, with the nearest valid name. Dynamo wraps it in a
            BackendCompilerFailed that shows the message.
    """
    switch.is_disabled_for_compile()  # the state now holds for a backward graph compiled later
    inductor, settings = split_options(options)
    chosen = inductor_options(inductor, mode=mode, **settings)
    return compat.compile_with_inductor(gm, example_inputs, chosen)


# torch._dynamo.reset() calls this on the backends in use, as it does on Inductor's.
setattr(fx_fusion, "reset", compat.reset_inductor)  # noqa: B010

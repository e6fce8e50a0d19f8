"""What the ranks of the tests of residuals in place run; each returns what was wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from unittest import mock

import gpu_support
import torch
from compiled_jobs import (
    Layers,
    differs_between_ranks,
    far_from_eager,
    graphs_of_all_ranks,
    hidden_states,
    meet,
    next_step,
    unfused,
    workspace_now,
)
from gpu_jobs import world_name
from op_support import call as call_op
from op_support import differences
from torch._inductor.utils import run_and_get_code

from fx_fusion.lowering import inductor, ops
from fx_fusion.lowering.arguments import Results, result_dtypes

#: Arguments of a site in generated code.
RESIDUAL, HIDDEN_STATE = 5, 9
#: The first site's residual is the model's input.
IN_PLACE = (False, True, True, True)
CALLS = 5
cuda: Any = torch.cuda


class Run(NamedTuple):
    """What one way of compiling the model came to.

    Attributes:
        code: The generated code of the first size.
        results: Norm and hidden state of each call.
        bytes: The most memory that a call without CUDA graphs takes.
    """

    code: str
    results: list[tuple[torch.Tensor, ...]]
    bytes: int


def in_place(code: str) -> tuple[bool, ...]:
    """Which sites write to their residual."""
    calls = [
        re.split(r", (?![^(]*\))", found)
        for found in re.findall(r"^ +fx_fusion_site_\w+\((.*)\)$", code, re.MULTILINE)
    ]
    return tuple(site[RESIDUAL] == site[HIDDEN_STATE] for site in calls)


def run_model(
    model: Layers, mode: str, sizes: tuple[int, ...], offer: Callable[..., None]
) -> Run:
    """Compile the model, letting Inductor know of residuals by `offer`; call it in turn."""
    workspace = workspace_now()
    options: dict[str, Any] = {"kernel": "fx_fusion"}
    if mode != "default":
        options["mode"] = mode
    torch._dynamo.reset()
    code, most = "", 0
    results: list[tuple[torch.Tensor, ...]] = []
    with (
        mock.patch.object(inductor, "offer_residuals", offer),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch.no_grad(),
        graphs_of_all_ranks(),
    ):
        compiled = torch.compile(model, backend="fx_fusion", options=options, dynamic=False)
        for tokens in sizes:
            h = hidden_states(tokens, 0)
            with unfused(workspace):
                if not code:
                    _, codes = cast(Any, run_and_get_code)(compiled, h)
                    code = codes[0]
                else:
                    next_step()
                    compiled(h)
            for _ in range(3):  # the launches are learned, the graph is captured
                next_step()
                compiled(h)
                torch.cuda.synchronize()
                meet()
        for call in range(CALLS * len(sizes)):
            h = hidden_states(sizes[call % len(sizes)], call)
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
            next_step()
            given = compiled(h)
            most = max(most, cuda.max_memory_allocated() - before)
            results.append(tuple(value.clone() for value in given))
            del given
        cuda.synchronize()
        meet()  # no rank drops its graphs while another's kernel waits
    workspace.check()
    return Run(code, results, most)


def model_two_ways(
    rank: int, world_size: int, mode: str, sizes: tuple[int, ...]
) -> tuple[list[str], int, int]:
    """A compiled model with its residuals in place, bit by bit the one without.

    Returns:
        What was wrong, and the most bytes that a call takes in place and not in place.
    """
    del world_size
    model = Layers(rank)
    # Inductor chooses its reduction's configuration by timing, and two choices differ in bits.
    model.norms_input = False
    place = run_model(model, mode, sizes, inductor.offer_residuals)
    plain = run_model(model, mode, sizes, lambda graph: None)
    wrong = []
    if in_place(place.code) != IN_PLACE:
        wrong.append(f"in place are {in_place(place.code)}")
    if any(in_place(plain.code)):
        wrong.append("something is in place that nobody offered")
    for call, (one, two) in enumerate(zip(place.results, plain.results, strict=True)):
        tokens = sizes[call % len(sizes)]
        for name, a, b in zip(("norm", "hidden state"), one, two, strict=True):
            count = int((a.view(torch.int16) != b.view(torch.int16)).sum())
            if count:
                wrong.append(f"call {call}, {tokens} tokens: {count} elements of the {name}")
        if call < len(sizes):
            wrong += far_from_eager(model, hidden_states(tokens, call), one)
    for one in place.results[-len(sizes) :]:
        if any(differs_between_ranks(value) for value in one):
            wrong.append("the ranks' results differ")
    return wrong, place.bytes, plain.bytes


def the_op(rank: int, world_size: int) -> list[str]:
    """The op that writes to its residual, launch after launch over the same memory."""
    forms = [
        form
        for form in gpu_support.FORMS
        if form.residual is not None and form.options.get("want_residual", True)
    ]
    gpu_support.workspace_of(forms=forms)
    wrong: list[str] = []
    seed = 0
    for form in forms:
        for algorithm in gpu_support.algorithms(world_size):
            for tokens in (1, 8, 65, 513):
                if tokens * form.hidden > gpu_support.MOST_ELEMENTS:
                    continue
                seed += 1
                part = gpu_support.parts_of(form, tokens, seed, world_size)[rank]
                arguments = gpu_support.arguments_of(
                    form, part, seed, world_size, world_name(), algorithm
                )
                residual = arguments.residual
                assert residual is not None
                if residual.dtype != result_dtypes(arguments)[1]:
                    continue
                own = residual.clone()
                fields = arguments._replace(residual=own)._asdict()
                positional = [fields.pop(name) for name in arguments._fields[:7]]
                for round_ in range(3):  # what one call wrote is the next one's residual
                    given = Results(*ops.into_residual(*positional, **fields))
                    expected = call_op(arguments)
                    given = given._replace(residual=own.clone())
                    wrong += [
                        f"{form}, {tokens} tokens, {algorithm}, call {round_}: {line}"
                        for line in differences(given, expected)
                    ]
                    arguments = arguments._replace(residual=expected.residual)
    return wrong

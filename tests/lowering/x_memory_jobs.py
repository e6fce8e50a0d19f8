"""Models whose sites may, or may not, add up in their x, and what runs them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from graph_caches import compile_every_graph_again
from in_place_jobs import CLOSE, HIDDEN, QUICK, Tensors, add_and_norm, tensors
from inductor_jobs import all_reduce
from torch._inductor.utils import run_and_get_code

from fx_fusion.backend import fx_fusion


def projected(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    return add_and_norm(x, x @ m)


def of_batches(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    """The GEMM's result is a view of two dimensions, seen as three."""
    h = x.view(2, -1, HIDDEN)
    return add_and_norm(h, h @ m)


def with_a_bias(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    return add_and_norm(x, torch.addmm(m[0], x, m))


def two_layers(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    n, h = add_and_norm(x, x @ m)
    return add_and_norm(h, n @ m)


def an_input(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    return add_and_norm(x.cos(), x)


def pointwise(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    return add_and_norm(x.cos(), x.sin())


def read_later(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    part = x @ m
    n, h = add_and_norm(x, part)
    return n, h, part @ n.t()


def returned(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    part = x @ m
    return *add_and_norm(x, part), part


def a_view_read_later(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    part = x @ m
    view = part.view(2, -1, HIDDEN)
    n, h = add_and_norm(x, part)
    return n, h, view.sin()


def its_base_read_later(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    part = x @ m
    n, h = add_and_norm(x.view(2, -1, HIDDEN), part.view(2, -1, HIDDEN))
    return n, h, part.sin()


def a_piece(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    both = torch.cat((x, x)) @ m
    return add_and_norm(x, both[len(x) :])


def its_own_residual(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    part = x @ m
    return add_and_norm(part, part)


def reduced_twice(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    part = x @ m
    return *add_and_norm(x, part), all_reduce(part).cos()


#: A model and which of its sites, in their order, may overwrite x.
CASES: dict[Callable[..., Tensors], tuple[bool, ...]] = {
    projected: (True,),
    of_batches: (True,),
    with_a_bias: (True,),
    two_layers: (True, True),
    an_input: (False,),
    pointwise: (False,),
    read_later: (False,),
    returned: (False,),
    a_view_read_later: (False,),
    its_base_read_later: (False,),
    a_piece: (False,),
    its_own_residual: (False,),
    reduced_twice: (False,),
}


def overwritten(code: str) -> tuple[bool, ...]:
    """Which sites of generated code may overwrite x."""
    made = re.findall(r"^fx_fusion_site_\w+ = CpuSite\((.*)\)$", code, re.MULTILINE)
    return tuple("may_overwrite_x=True" in constants for constants in made)


def every_case(rank: int, world_size: int) -> dict[str, tuple[tuple[bool, ...], list[str]]]:
    """By model: which of its sites may overwrite x, and which results are far from eager's."""
    del world_size
    compile_every_graph_again()
    found = {}
    for model in CASES:
        torch._dynamo.reset()
        compiled = torch.compile(
            model, backend=fx_fusion, options={**QUICK, "fx_fusion.kernel": "unfused"}
        )
        wrong = []
        with torch.no_grad():
            for call in range(3):
                given = tensors(rank, call, 4)
                expected = model(*given)
                if call == 0:
                    results, codes = cast(Any, run_and_get_code)(compiled, *given)
                else:
                    results = compiled(*given)
                for number, (one, two) in enumerate(zip(results, expected, strict=True)):
                    if not torch.allclose(one, two, rtol=0, atol=CLOSE):
                        wrong.append(f"call {number}, result {number}")
        found[model.__name__] = overwritten(codes[0]), wrong
    return found


def collectives(rank: int, world_size: int) -> list[str]:
    """The collectives that the dispatcher sees of two sites that may overwrite x."""
    del world_size
    compile_every_graph_again()
    options = {**QUICK, "fx_fusion.kernel": "unfused"}
    compiled = torch.compile(two_layers, backend=fx_fusion, options=options)
    with torch.no_grad():
        compiled(*tensors(rank, 0, 4))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            compiled(*tensors(rank, 1, 4))
    events = [(event.key, event.count) for event in seen.key_averages()]
    return sorted(
        f"{name} {count}"
        for name, count in events
        if name.startswith("_c10d_functional::all_reduce")
    )

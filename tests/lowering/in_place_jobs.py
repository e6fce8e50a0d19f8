"""What runs on the ranks in the tests of residuals that are written to in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
from graph_caches import compile_every_graph_again
from inductor_jobs import all_reduce
from op_support import bits
from torch._inductor.utils import run_and_get_code

from fx_fusion.backend import fx_fusion
from fx_fusion.lowering import inductor

HIDDEN, TOKENS = 64, 4
#: fp32; the norm adds up its squares in another order than eager.
CLOSE = 2e-5
#: Compiles C++ sooner: no vector code, no trial of it.
QUICK: dict[str, Any] = {"cpp.vec_isa_ok": False}
#: Arguments of a site in generated code, after the stream and rows that a GPU's has.
RESIDUAL, HIDDEN_STATE = 3, 7
Tensors = tuple[torch.Tensor, ...]


def norm(h: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(h, (HIDDEN,), None, 1e-6)


def add_and_norm(h: torch.Tensor, x: torch.Tensor) -> Tensors:
    """A site: the norm and the hidden state."""
    h = h + all_reduce(x)
    return norm(h), h


def layers(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    n, h = x @ m, x.sin()
    for _ in range(4):
        n, h = add_and_norm(h, n @ m)
    return n, h


def of_an_input(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    n, h = add_and_norm(x, x @ m)
    return add_and_norm(h, n @ m)


def of_a_viewed_input(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    return add_and_norm(x.view(2, -1, HIDDEN), (x @ m).view(2, -1, HIDDEN))


def viewed_and_read_later(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    before = x @ m
    view = before.view(-1, HIDDEN // 2)
    n, h = add_and_norm(before, x)
    return n, h, view @ m[: HIDDEN // 2]


def returned(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    before = x @ m
    return *add_and_norm(before, x), before


def returned_as_a_view(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    before = x @ m
    return *add_and_norm(before, x), before[1:]


def read_later(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    before = x @ m
    n, h = add_and_norm(before, x)
    return n, h, before @ n.t()


def read_before(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    """What reads the residual comes first in the graph, and is wanted after the site."""
    before = x @ m
    early = before.sin()
    n, h = add_and_norm(before, x)
    return n, h, early.cos() @ n.t()


def of_another_dtype(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    return add_and_norm(x.bfloat16() @ m.bfloat16(), x)


def reduced_itself(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    before = x @ m
    return add_and_norm(before, before)


def a_piece(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    """The residual is a part of something larger."""
    both = torch.cat((x, x)) @ m
    return add_and_norm(both[len(x) :], x)


def joined_and_read_later(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    """Inductor computes the residual where the joined tensor has its part."""
    before = x.sin()
    both = torch.cat((before, x.cos()))
    n, h = add_and_norm(before, x @ m)
    return n, h, both @ m


def of_parts_read_later(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    """Inductor computes the parts where the residual is."""
    first, second = x[:1].sin(), x[1:].cos()
    n, h = add_and_norm(torch.cat((first, second)), x @ m)
    return n, h, first @ m


def copied_to_an_input(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    """Mutates its argument, as the caller sees."""
    n, h = add_and_norm(x, x @ m)
    x.copy_(h)
    return (n,)


def without_residual(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    """The first site has no residual; what it reduced is the second one's."""
    h = all_reduce(x @ m)
    return add_and_norm(h, norm(h) @ m)


#: A model and which of its sites, in their order, write to their residual.
CASES: dict[Callable[..., Tensors], tuple[bool, ...]] = {
    layers: (True,) * 4,
    of_an_input: (False, True),
    of_a_viewed_input: (False,),
    viewed_and_read_later: (False,),
    returned: (False,),
    returned_as_a_view: (False,),
    read_later: (False,),
    read_before: (True,),
    of_another_dtype: (False,),
    reduced_itself: (False,),
    a_piece: (False,),
    joined_and_read_later: (False,),
    of_parts_read_later: (False,),
    copied_to_an_input: (False,),
    without_residual: (False, True),
}


def tensors(rank: int, call: int, tokens: int) -> Tensors:
    own = torch.Generator().manual_seed(10 * call + rank)
    same = torch.Generator().manual_seed(99)
    x = torch.randn(tokens, HIDDEN, generator=own)
    return x, torch.randn(HIDDEN, HIDDEN, generator=same) / HIDDEN**0.5


def in_place(code: str) -> tuple[bool, ...]:
    """Which sites of generated code write to their residual."""
    body = code[code.index("def call(") :]
    calls = [
        re.split(r", (?![^(]*\))", found)  # not within a view's size
        for found in re.findall(r"^ +fx_fusion_site_\w+\((.*)\)$", body, re.MULTILINE)
    ]
    return tuple(
        call[RESIDUAL] == call[HIDDEN_STATE] and call[RESIDUAL] != "None" for call in calls
    )


def buffers(code: str) -> int:
    """The buffers that generated code allocates."""
    return code.count("empty_strided_cpu(", code.index("def call("))


def compiled(
    model: Callable[..., Any], dynamic: bool = False, **options: Any
) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(
        model, backend=fx_fusion, options={**QUICK, **options}, dynamic=dynamic
    )


def two_ways(
    model: Callable[..., Tensors],
    given: list[Tensors],
    dynamic: bool = False,
) -> tuple[list[str], str, str]:
    """What is wrong with a model's results, its code, and its code with nothing in place.

    Args:
        model: Maps tensors to tensors; may mutate its first one.
        given: The arguments of each call.
        dynamic: Compile for all sizes.
    """
    results: dict[bool, list[Tensors]] = {}
    codes: dict[bool, str] = {}
    for offers in (True, False):
        offer = inductor.offer_residuals if offers else lambda graph: None
        with mock.patch.object(inductor, "offer_residuals", offer):
            call = compiled(model, dynamic=dynamic)
            _, code = cast(Any, run_and_get_code)(call, *(one.clone() for one in given[0]))
            codes[offers] = code[0]
            results[offers] = [_with_mutated(call, arguments) for arguments in given]
    wrong = []
    expected = [_with_mutated(model, arguments) for arguments in given]
    for number, (one, two, eager) in enumerate(
        zip(results[True], results[False], expected, strict=True)
    ):
        if not all(torch.equal(bits(a), bits(b)) for a, b in zip(one, two, strict=True)):
            wrong.append(f"{model.__name__}, call {number}: other bits than not in place")
        off = max(float((a - b).abs().max()) for a, b in zip(one, eager, strict=True))
        if not off <= CLOSE * (1 + max(float(b.abs().max()) for b in eager)):
            wrong.append(f"{model.__name__}, call {number}: {off} from eager")
    return wrong, codes[True], codes[False]


def _with_mutated(model: Callable[..., Tensors], arguments: Tensors) -> Tensors:
    """The results, and the arguments as they are afterwards."""
    own = tuple(one.clone() for one in arguments)
    return *model(*own), *own


def one_case(model: Callable[..., Tensors]) -> tuple[list[str], tuple[bool, ...]]:
    """What is wrong with a model's results, and which of its sites are in place."""
    compile_every_graph_again()
    with torch.no_grad():
        wrong, code, _ = two_ways(model, [tensors(0, call, TOKENS) for call in range(2)])
    return wrong, in_place(code)


def layers_of_several_sizes(rank: int, world_size: int) -> tuple[list[str], str, str]:
    """The layers with dynamic sizes, called with several numbers of tokens."""
    del world_size
    compile_every_graph_again()
    given = [tensors(rank, call, tokens) for call, tokens in enumerate((4, 7, 1, 4, 600))]
    with torch.no_grad():
        return two_ways(layers, given, dynamic=True)


def by_the_cpp_wrapper() -> tuple[str, float]:
    """The code of two sites in the C++ wrapper, and the largest difference from eager."""
    compile_every_graph_again()
    given = tensors(0, 0, TOKENS)
    with torch.no_grad():
        call = compiled(of_an_input, cpp_wrapper=True)
        results, codes = cast(Any, run_and_get_code)(call, *given)
        expected = of_an_input(*given)
    off = max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True))
    return codes[0], off


def saved_for_backward(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    before = x @ m
    return add_and_norm(before, before @ m)


def not_saved(x: torch.Tensor, m: torch.Tensor) -> Tensors:
    return add_and_norm(x.sin(), x @ m)


def trained(model: Callable[..., Tensors]) -> tuple[tuple[bool, ...], bool]:
    """Which sites of a training step's forward are in place; whether its gradients are those
    of the step with nothing in place."""
    compile_every_graph_again()
    gradients, forwards = [], []
    for offer in (inductor.offer_residuals, lambda graph: None):
        with mock.patch.object(inductor, "offer_residuals", offer):
            call = compiled(model)
            own = [one.requires_grad_() for one in tensors(0, 0, TOKENS)]

            def step(call: Any = call, own: Any = own) -> None:
                n, h = call(*own)
                (n.sum() + h.square().sum()).backward()

            _, codes = cast(Any, run_and_get_code)(step)
            forwards.append(next(code for code in codes if "fx_fusion_site" in code))
            gradients.append([cast(torch.Tensor, one.grad) for one in own])
    equal = all(torch.equal(bits(a), bits(b)) for a, b in zip(*gradients, strict=True))
    return in_place(forwards[0]), equal

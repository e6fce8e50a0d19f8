"""The CUDA graphs that the kernels benchmark times, their inputs and what must come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import torch

from fx_fusion.bench.kernel_steps import Candidate, add_rms_norm

#: Ops of a graph, and of one with more tokens than `MANY_TOKENS`, for memory's sake.
OPS: Final = 20
FEWER_OPS: Final = 4
MANY_TOKENS: Final = 256
#: Roundings by which norms of one hidden state may differ: the order of adding up its squares,
#: the root, and the rounding before the weight.
_NORM_ROUNDINGS: Final = {2: 6, 4: 64}
#: The same for the factor of a whole row, in which its elements' roundings even out: 16-bit norms
#: are rounded from an fp32 root that another order moves by far less; in fp32 that move, of 8 ulp
#: at most as the kernels' tests bound it, is all there is.
_FACTOR_ROUNDINGS: Final = {2: 1, 4: 16}
#: What stands between the ops of a graph.
ALONE: Final = "nothing"
WARM: Final = "GEMMs, L2 warm"
COLD: Final = "GEMMs, L2 cold"
_Pair = tuple[torch.Tensor, torch.Tensor]


class Expected(NamedTuple):
    """What one op must return.

    Attributes:
        norm: The norm of the hidden state.
        hidden: The new residual, of the sum in rank order rounded once.
        slack: By how much a sum that is rounded at each addition may move `hidden`, fp32.
    """

    norm: torch.Tensor
    hidden: torch.Tensor
    slack: torch.Tensor


class Inputs(NamedTuple):
    """One rank's inputs of a graph, and what must come out.

    Attributes:
        x: One partial sum for each op, another on every rank.
        residual: The first op's, the same on every rank.
        weight: The norm's.
        first: Of the first op.
        last: Of the last op, if each op takes the residual of the one before.
        last_apart: Of the last op, if each takes the first residual.
    """

    x: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor
    first: Expected
    last: Expected
    last_apart: Expected


def ops_of(tokens: int) -> int:
    """Ops of a graph for so many tokens."""
    return OPS if tokens <= MANY_TOKENS else FEWER_OPS


def make_inputs(
    tokens: int, hidden_size: int, dtype: torch.dtype, rank: int, world_size: int, device: str
) -> Inputs:
    """Random inputs; every rank makes those of all, to add them up in rank order."""

    def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    unit = torch.finfo(dtype).eps / 2
    sources = [torch.Generator(device).manual_seed(1 + r) for r in range(world_size)]
    common = torch.Generator(device).manual_seed(0)
    residual, weight = random(common, tokens, hidden_size), random(common, hidden_size)
    own: list[torch.Tensor] = []
    results: list[Expected] = []
    hidden, reduced = residual, residual
    slack = moved = torch.zeros(tokens, hidden_size, device=device)
    for _ in range(ops_of(tokens)):
        total, magnitude = torch.zeros_like(slack), torch.zeros_like(slack)
        for r, source in enumerate(sources):
            part = random(source, tokens, hidden_size)
            total += part
            magnitude += part.abs()
            if r == rank:
                own.append(part)
        reduced = total.to(dtype)
        # each of the additions and the rounding of the sum, then that of the hidden state
        moved = world_size * unit * magnitude
        norm, hidden = add_rms_norm(reduced, hidden, weight)
        slack = slack + moved + 2 * unit * hidden.abs()
        results = [*results[:1], Expected(norm, hidden, slack)]
    norm, hidden = add_rms_norm(reduced, residual, weight)
    apart = Expected(norm, hidden, moved + 2 * unit * hidden.abs())
    return Inputs(own, residual, weight, results[0], results[-1], apart)


class Gemms(NamedTuple):
    """The GEMMs around the ops, as a row-parallel and a column-parallel layer have them.

    Attributes:
        start: The first one's input, [tokens, inner].
        before: Weights of the GEMM that makes x, [inner, hidden size], in turn.
        after: Weights of the GEMM that takes the norm, [hidden size, inner], in turn.
    """

    start: torch.Tensor
    before: Sequence[torch.Tensor]
    after: Sequence[torch.Tensor]


def make_gemms(
    tokens: int, hidden_size: int, dtype: torch.dtype, world_size: int, *, cold: bool
) -> Gemms:
    """Weights for the GEMMs: one of each for a warm L2, cold more than three L2s hold in turn."""
    inner = max(64, hidden_size // world_size // 64 * 64)
    count = 1
    if cold:
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        count = math.ceil(
            3 * properties.L2_cache_size / (2 * inner * hidden_size * dtype.itemsize)
        )
        count = min(OPS, 1 + count)

    def random(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, device="cuda") / math.sqrt(rows)
        return values.to(dtype)

    return Gemms(
        random(tokens, inner),
        [random(inner, hidden_size) for _ in range(count)],
        [random(hidden_size, inner) for _ in range(count)],
    )


class Captured(NamedTuple):
    """A graph, and what has to live as long as it.

    Attributes:
        graph: The ops.
        first: Norm and residual of the first op, in the graph's memory.
        last: Those of the last op.
        keep: Holds the memory that the graph reads and writes besides.
    """

    graph: Any
    first: _Pair
    last: _Pair
    keep: Any


def capture(candidate: Candidate, inputs: Inputs, gemms: Gemms | None = None) -> Captured:
    """A graph of one op for each x; it doesn't run yet, but all that it needs is loaded."""
    if candidate.warm_up:
        candidate.step(inputs.x[0], inputs.residual, inputs.weight)
    results: list[_Pair] = []

    def run() -> None:
        hidden = inputs.residual
        after = None if gemms is None else gemms.start
        for number, x in enumerate(inputs.x):
            if gemms is not None and after is not None:
                x = after @ gemms.before[number % len(gemms.before)]
            norm, new = candidate.step(x, hidden, inputs.weight)
            if candidate.chained:
                hidden = new
            if gemms is not None:
                after = norm @ gemms.after[number % len(gemms.after)]
            if number in (0, len(inputs.x) - 1):
                results.append((norm, new))

    graph = _capture(run)
    return Captured(graph, results[0], results[-1], (candidate, inputs, gemms))


def capture_gemms(gemms: Gemms, ops: int) -> Any:
    """The same graph without the ops: each GEMM takes what the one before gave."""

    def run() -> None:
        after = gemms.start
        for number in range(ops):
            x = after @ gemms.before[number % len(gemms.before)]
            after = x @ gemms.after[number % len(gemms.after)]

    run()  # loads the GEMMs' kernels
    return _capture(run)


def _capture(run: Callable[[], None]) -> Any:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def difference(given: _Pair, expected: Expected, weight: torch.Tensor, *, exact: bool) -> str:
    """What differs by more than rounding can explain, "" if nothing does.

    Args:
        given: Norm and new residual.
        expected: What they should be.
        weight: The norm's.
        exact: The sum over ranks is in fp32 in rank order, so that the residual has no slack.
    """
    norm, hidden = given
    for name, one, two in (
        ("norm", norm, expected.norm),
        ("residual", hidden, expected.hidden),
    ):
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"its {name} is {one.dtype} {tuple(one.shape)}"
    unit = torch.finfo(norm.dtype).eps / 2
    slack = torch.zeros_like(expected.slack) if exact else expected.slack
    hidden32, norm32 = expected.hidden.float(), expected.norm.float()
    square = hidden32.square().mean(-1, keepdim=True)
    shift = (hidden32.abs() * slack).mean(-1, keepdim=True) / square
    allowed = norm32.abs() * (_NORM_ROUNDINGS[norm.element_size()] * unit + shift)
    allowed += weight.float().abs() * slack * square.rsqrt() + torch.finfo(norm.dtype).tiny
    for name, one, two, most in (
        ("residual", hidden, hidden32, slack),
        ("norm", norm, norm32, allowed),
    ):
        wrong = ~((one.float() - two).abs() <= most)  # NaN is wrong
        if count := int(wrong.sum()):
            return f"{count} of {wrong.numel()} elements of its {name} are wrong"
    # Roundings even out over a row, a wrong sum of squares doesn't.
    factor = (norm.double() * norm32).sum(-1) / norm32.double().square().sum(-1)
    most_off = _FACTOR_ROUNDINGS[norm.element_size()] * unit + shift.squeeze(-1)
    if count := int(((factor - 1).abs() > most_off).sum()):
        return f"{count} of {factor.numel()} rows of its norm are off by a factor"
    return ""


def wrong_results(made: Captured, candidate: Candidate, inputs: Inputs) -> str:
    """What a graph without GEMMs got wrong when it last ran; "" if nothing."""
    exact = candidate.exact
    if wrong := difference(made.first, inputs.first, inputs.weight, exact=exact):
        return wrong
    if candidate.prepare is not None:  # every op reduced the first x
        return ""
    expected = inputs.last if candidate.chained else inputs.last_apart
    wrong = difference(made.last, expected, inputs.weight, exact=exact)
    return wrong and f"after {len(inputs.x)} ops, {wrong}"


def replay_microseconds(graph: Any, ops: int) -> float:
    """Microseconds an op of a graph of so many, of a replay that follows another; the ranks have just met."""
    timing = cast(Any, torch.cuda)
    start, end = (timing.Event(enable_timing=True) for _ in range(2))
    graph.replay()  # brings the ranks into step
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000 / ops

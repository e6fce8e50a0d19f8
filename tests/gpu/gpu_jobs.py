"""What the ranks of the GPU tests run; each returns a list of what was wrong."""

from __future__ import annotations

import itertools
import logging
import random
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpu_support import (
    FORMS,
    MOST_ELEMENTS,
    Differences,
    Form,
    algorithms,
    arguments_of,
    expected_of,
    parts_of,
    tokens_for,
    workspace_of,
)
from op_support import call

from fx_fusion.lowering import gpu_local, unfused
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.reference import fp64_oracle
from fx_fusion.lowering.select import forced_plan

log = logging.getLogger(__name__)

#: torch leaves parts of it untyped.
cuda: Any = torch.cuda


def one_call(
    form: Form,
    tokens: int,
    seed: int,
    rank: int,
    world_size: int,
    name: str,
    algorithm: str = "",
) -> tuple[Arguments, Results, list[torch.Tensor]]:
    parts = parts_of(form, tokens, seed, world_size)
    arguments = arguments_of(form, parts[rank], seed, world_size, name, algorithm)
    return arguments, call(arguments), parts


def world_name() -> str:
    group = dist.group.WORLD
    assert group is not None
    return str(group.group_name)


def delay(choice: random.Random, rank: int, world_size: int) -> None:
    """Now and then one rank comes late, on the host or on the device."""
    late, how = choice.randrange(world_size), choice.random()
    cycles = choice.randrange(100_000, 2_000_000)  # drawn on all ranks, which stay in step
    if rank == late and how < 0.1:
        cuda._sleep(cycles)
    elif rank == late and how < 0.2:
        time.sleep(0.001)


def mixed_calls(
    rank: int,
    world_size: int,
    seed: int,
    calls: int,
    forms: Sequence[Form] = FORMS,
    most_tokens: int = 513,
) -> list[str]:
    """Calls of mixed algorithms, tokens, hidden sizes, dtypes and forms, ranks out of step."""
    workspace = workspace_of(forms=forms)
    choice, differences = random.Random(seed), Differences()
    for number in range(calls):
        form = choice.choice(forms)
        tokens = min(tokens_for(form, choice), most_tokens)
        algorithm = choice.choice(algorithms(world_size))
        delay(choice, rank, world_size)
        name = f"call {number}, {algorithm}, {tokens} tokens, {form}"
        log.debug("rank %d: %s", rank, name)
        arguments, given, parts = one_call(
            form, tokens, seed + number, rank, world_size, world_name(), algorithm
        )
        differences.compare(
            name,
            given,
            arguments,
            expected_of(parts, arguments),
        )
    workspace.check()
    return differences.lines()


def few_tokens(rank: int, world_size: int) -> list[str]:
    """Mixed calls of 1 to 8 tokens, of as many ranks as one GPU can hold."""
    forms = [FORMS[number] for number in (0, 1, 4, 9)]
    return mixed_calls(rank, world_size, 90_000, 60, forms, 8)


def back_to_back(rank: int, world_size: int, seed: int, calls: int) -> list[str]:
    """The same without anything in between: inputs are made before, compared after."""
    workspace_of()
    choice, differences = random.Random(seed), Differences()
    jobs = []
    for number in range(calls):
        form = choice.choice([f for f in FORMS if f.hidden <= 8192])
        tokens = choice.choice((1, 3, 8, 64))
        parts = parts_of(form, tokens, seed + number, world_size)
        algorithm = choice.choice(algorithms(world_size))
        arguments = arguments_of(
            form, parts[rank], seed + number, world_size, world_name(), algorithm
        )
        jobs.append((f"{number}, {algorithm}, {tokens} tokens, {form}", arguments, parts))
    results = [call(arguments) for _, arguments, _ in jobs]
    for (name, arguments, parts), given in zip(jobs, results, strict=True):
        differences.compare(name, given, arguments, expected_of(parts, arguments))
    return differences.lines()


def rows_do_not_depend_on_the_batch(rank: int, world_size: int) -> list[str]:
    """Nor on the algorithm: rows of a batch alone, by each, have the batch's bits."""
    failed = []
    for form in (FORMS[0], FORMS[2], FORMS[9], FORMS[4]):
        arguments, whole, _ = one_call(form, 128, 7, rank, world_size, world_name())
        for rows, algorithm in itertools.product(
            (slice(0, 1), slice(77, 80), slice(64, 128), slice(0, 128)), algorithms(world_size)
        ):
            residual = arguments.residual
            part = arguments._replace(
                x=arguments.x[rows],
                residual=None if residual is None else residual[rows],
                plan=forced_plan(algorithm),
            )
            for name, one, two in zip(Results._fields, call(part), whole, strict=True):
                if one.numel() and not torch.equal(one, two[rows]):
                    failed.append(f"{algorithm}, {form} rows {rows}: {name}")
    return failed


def all_ranks_get_the_same_bits(rank: int, world_size: int) -> list[str]:
    failed = []
    for algorithm in algorithms(world_size):
        _, given, _ = one_call(FORMS[0], 65, 11, rank, world_size, world_name(), algorithm)
        mine = given.norm.view(torch.uint8).cpu()
        gathered = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(gathered, mine)
        failed += [
            f"{algorithm}, rank {r}"
            for r, other in enumerate(gathered)
            if not torch.equal(other, mine)
        ]
    return failed


def near_the_exact_answer(rank: int, world_size: int) -> list[str]:
    failed = []
    for form in FORMS:
        arguments, given, parts = one_call(form, 8, 13, rank, world_size, world_name())
        exact = fp64_oracle(parts, arguments)
        unit = max(torch.finfo(given.norm.dtype).eps, torch.finfo(form.x).eps)
        if arguments.norm_dtype is not None:
            unit = max(unit, torch.finfo(arguments.norm_dtype).eps)
        if form.residual is not None:
            unit = max(unit, torch.finfo(form.residual).eps)
        if arguments.add_dtype is not None:
            unit = max(unit, torch.finfo(arguments.add_dtype).eps)
        off = (given.norm.double() - exact.norm).abs().amax(-1)
        size = exact.norm.abs().amax(-1)
        if not bool((off <= 6 * unit * size).all()):
            failed.append(f"{form}: {float((off / size / unit).max()):.1f} units")
    return failed


def local_kernel(rank: int, world_size: int) -> list[str]:
    """Add and norm alone, as the unfused path runs them; the bits are the fused kernels'."""
    workspace_of()
    group = dist.group.WORLD
    machine = gpu_local.machine_of(torch.cuda.current_device())
    assert group is not None
    assert machine is not None
    differences, failed = Differences(), []
    for number, (form, tokens) in enumerate(itertools.product(FORMS, (1, 64, 513))):
        if tokens * form.hidden > MOST_ELEMENTS:
            continue
        name = f"{tokens} tokens, {form}"
        arguments, fused, parts = one_call(
            form, tokens, 6000 + number, rank, world_size, world_name()
        )
        torch.cuda.synchronize()
        expected = expected_of(parts, arguments)
        given = gpu_local.run(expected.reduced, arguments)
        assert given is not None
        differences.compare(name, given, arguments, expected)
        for field, one, two in zip(Results._fields, given, fused, strict=True):
            if one.numel() and not torch.equal(one, two):
                failed.append(f"{name}: {field} is not the fused kernel's")
        if number % 9 == 0:  # the path as a whole, with a sum in rank order
            ordered = arguments._replace(deterministic=True)
            whole = unfused.run(ordered, group)
            differences.compare(f"unfused, {name}", whole, ordered, expected)
    if None in machine.launchers.values():
        failed.append("a variant can't be had")
    return failed + differences.lines()


def odd_layouts(rank: int, world_size: int) -> list[str]:
    """One rank's x isn't aligned, another's isn't contiguous; the path is the same."""
    differences = Differences()
    form = FORMS[0]
    for number in range(4):
        parts = parts_of(form, 5, 900 + number, world_size)
        arguments = arguments_of(form, parts[rank], 900 + number, world_size, world_name())
        expected = expected_of(parts, arguments)
        x = arguments.x
        if rank == number % world_size:
            room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
            x = room[1:].view(x.shape).copy_(x)
        elif rank == (number + 1) % world_size:
            x = x.t().contiguous().t()
        three = arguments._replace(
            x=x, eps_tensor=torch.tensor(1e-6), scale_tensor=torch.tensor(1.0, device="cuda")
        )
        differences.compare(f"call {number}", call(three), three, expected)
    empty = arguments._replace(x=x[:0], residual=x[:0])
    if call(empty).norm.shape != (0, form.hidden):
        return ["no tokens"]
    return differences.lines()


def two_streams(rank: int, world_size: int) -> list[str]:
    """Calls that come from two streams in turn run in the order in which they came."""
    streams = [cuda.Stream(), cuda.Stream()]
    differences = Differences()
    jobs = []
    for number in range(40):
        parts = parts_of(FORMS[0], 8, 2000 + number, world_size)
        arguments = arguments_of(FORMS[0], parts[rank], 2000 + number, world_size, world_name())
        jobs.append((arguments, parts))
    torch.cuda.synchronize()
    results = []
    for number, (arguments, _) in enumerate(jobs):
        with torch.cuda.stream(streams[number % 2]):
            results.append(call(arguments))
    torch.cuda.synchronize()
    for number, ((arguments, parts), given) in enumerate(zip(jobs, results, strict=True)):
        expected = expected_of(parts, arguments)
        differences.compare(f"call {number}", given, arguments, expected)
    return differences.lines()


def everything(rank: int, world_size: int, calls: int) -> dict[str, list[str]]:
    """The jobs that share a start of processes."""
    jobs: dict[str, Any] = {
        "mixed calls": lambda: mixed_calls(rank, world_size, 10_000, calls),
        "back to back": lambda: back_to_back(rank, world_size, 50_000, 150),
        "batch": lambda: rows_do_not_depend_on_the_batch(rank, world_size),
        "same bits": lambda: all_ranks_get_the_same_bits(rank, world_size),
        "exact": lambda: near_the_exact_answer(rank, world_size),
        "local": lambda: local_kernel(rank, world_size),
        "layouts": lambda: odd_layouts(rank, world_size),
        "streams": lambda: two_streams(rank, world_size),
        "graphs": lambda: two_graphs(rank, world_size, 300),
    }
    results = {}
    for name, job in jobs.items():
        start = time.monotonic()
        try:
            results[name] = job()
        except Exception:  # one job's failure is not to hide the others'
            results[name] = [traceback.format_exc()]
        torch.cuda.synchronize()
        log.info("rank %d: %s took %.1f s", rank, name, time.monotonic() - start)
    return results


class SteppedGraph:
    """A captured graph whose inputs a kernel in it changes, and which compares its results."""

    def __init__(self, shapes: list[tuple[Form, int]], seed: int, rank: int, size: int) -> None:
        self.steps = torch.zeros((), dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.cases = []
        for number, (form, tokens) in enumerate(shapes):
            base = parts_of(form, tokens, seed + number, size)
            drift = parts_of(form, tokens, seed + 100 + number, size)
            algorithm = algorithms(size)[number % len(algorithms(size))]
            arguments = arguments_of(
                form, base[rank], seed + number, size, world_name(), algorithm
            )
            self.cases.append((base, drift, arguments))
        self.rank = rank
        stream = cuda.Stream()
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        self.steps.add_(1)
        factor = (self.steps * 389 % 1021).float() / 64  # no two of 1021 in a row are equal
        jobs = []
        for base, drift, arguments in self.cases:
            parts = [
                (b.float() + d.float() * factor).to(b.dtype)
                for b, d in zip(base, drift, strict=True)
            ]
            jobs.append((parts, arguments._replace(x=parts[self.rank])))
        results = [call(arguments) for _, arguments in jobs]
        for (parts, arguments), given in zip(jobs, results, strict=True):
            check = Differences()
            check.compare("", given, arguments, expected_of(parts, arguments))
            self.wrong.add_(torch.stack(check.counts).sum())


def many_replays(rank: int, world_size: int) -> list[str]:
    return two_graphs(rank, world_size, 100_000)


def two_graphs(rank: int, world_size: int, replays: int) -> list[str]:
    """Two graphs in random order, ranks out of step, every output of every replay compared."""
    workspace = workspace_of()
    one = SteppedGraph([(FORMS[0], 8), (FORMS[1], 3), (FORMS[9], 2)], 70_000, rank, world_size)
    two = SteppedGraph([(FORMS[4], 5), (FORMS[2], 16)], 80_000, rank, world_size)
    choice = random.Random(5)
    seldom = max(1, replays // 1000)  # delays and eager calls are slow
    dist.barrier()
    for number in range(replays):
        if number % seldom == 0:
            delay(choice, rank, world_size)
        choice.choice((one, two)).graph.replay()
        if number % (10 * seldom) == 0:  # eager calls in between
            one_call(FORMS[3], 4, number, rank, world_size, world_name())
    torch.cuda.synchronize()
    workspace.check()
    steps = int(one.steps + two.steps)
    failed = [] if steps == replays + 2 else [f"{steps} steps"]
    return failed + [f"{int(g.wrong)} elements" for g in (one, two) if int(g.wrong)]


def several_groups(rank: int, world_size: int) -> list[str]:
    """Two halves and the whole, their calls interleaved."""
    half = world_size // 2
    halves = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world_size)))]
    own = halves[rank // half]
    workspace_of()
    workspace_of(own)
    differences = Differences()
    for number in range(60):
        whole = number % 3 == 0
        size, place = (world_size, rank) if whole else (half, rank % half)
        name = world_name() if whole else str(own.group_name)
        seed = 3000 + number + (0 if whole else 500 * (1 + rank // half))
        form, tokens = FORMS[number % 4], (1, 5, 64)[number % 3]
        algorithm = algorithms(size)[number // 3 % len(algorithms(size))]
        arguments, given, parts = one_call(form, tokens, seed, place, size, name, algorithm)
        differences.compare(f"call {number}", given, arguments, expected_of(parts, arguments))
    return differences.lines()


def large_calls(rank: int, world_size: int) -> list[str]:
    """Calls larger than the ring stream through it."""
    differences = Differences()
    workspace_of()
    for number, (form, tokens, algorithm) in enumerate(
        itertools.product(
            (FORMS[0], FORMS[1], FORMS[9], FORMS[4]), (2048, 8192), algorithms(world_size)
        )
    ):
        name = f"{algorithm}, {tokens} tokens, {form}"
        arguments, given, parts = one_call(
            form, tokens, 4000 + number, rank, world_size, world_name(), algorithm
        )
        differences.compare(name, given, arguments, expected_of(parts, arguments))
        torch.cuda.synchronize()
    return differences.lines()

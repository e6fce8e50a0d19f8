"""Run cases on real ranks, compiled, and compare them with eager: what `spawn` calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cases_graphs  # noqa: F401  (registers its cases, as do the following)
import cases_norms  # noqa: F401
import cases_reported  # noqa: F401
import cases_steps  # noqa: F401
import torch
from case_support import CASES, Case, Groups, make_groups
from graph_support import compiled_op_by_op
from torch import nn

import fx_fusion
from fx_fusion.report import FusionReport, Reason

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: How far a value computed from norms may be off, relative to the largest; a norm may differ
#: from eager's in its last bit, and that goes on through the layers behind it.
_RELATIVE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}


@dataclass(frozen=True)
class Outcome:
    """What became of a case on one rank.

    Attributes:
        fused: How many sites fused.
        reasons: Why the others didn't, in order.
        faults: One line for each difference from eager.
    """

    fused: int
    reasons: tuple[Reason, ...]
    faults: tuple[str, ...]


def run_cases(
    rank: int, world_size: int, names: tuple[str, ...], dynamic: tuple[str, ...], cache: str
) -> dict[str, Outcome]:
    """Compile and run the cases `names`, and `dynamic` with dynamic=True, on every rank."""
    # Ranks may share what they compile: nothing of a rank is in it.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    groups = make_groups(rank, world_size)
    found = {name: run_case(CASES[name], groups, rank, None) for name in names}
    for name in dynamic:
        found[f"{name}, dynamic"] = run_case(CASES[name], groups, rank, True)
    return found


def run_case(case: Case, groups: Groups, rank: int, dynamic: bool | None) -> Outcome:
    """One case: eager, then compiled, on equal inputs."""
    torch._dynamo.reset()
    fx_fusion.clear_reports()
    fn, args = case.make(groups, rank)
    eager = _called(fn, args, case.train)
    again, args = case.make(groups, rank)
    given = _called(_compiled(again, case, dynamic), args, case.train)
    report = FusionReport.merged(fx_fusion.reports())
    reasons = tuple(site.reason for site in report.sites if site.reason is not None)
    kinds = case.outputs + "-" * (len(eager) - len(case.outputs))
    faults = []
    for index, (a, b, kind) in enumerate(zip(given, eager, kinds, strict=True)):
        faults += [f"output {index}: {fault}" for fault in differences(a, b, kind)]
    return Outcome(report.fused_count, reasons, tuple(faults))


def _compiled(fn: Callable[..., Any], case: Case, dynamic: bool | None) -> Callable[..., Any]:
    """With Inductor; a graph of which no site is fused is all Inductor's, and is run op by op."""
    if not (case.fused and case.inductor):
        return compiled_op_by_op(fn, dynamic=dynamic)
    # Where a site is left to Inductor, keep it from reading a result before its wait.
    options = fx_fusion.inductor_options({"max_fusion_size": 1} if case.reasons else {})
    return torch.compile(fn, options=options, dynamic=dynamic, fullgraph=True)


def _called(fn: Callable[..., Any], args: tuple[Any, ...], train: bool) -> list[torch.Tensor]:
    """The outputs, the inputs as the call left them, and the gradients."""
    with torch.set_grad_enabled(train):
        outputs = list(tensors(fn(*args)))
    if train:
        torch.autograd.backward(outputs[0].float().sum())
    gradients = [t.grad for t in (*_parameters(fn), *tensors(args)) if t.grad is not None]
    return [*(t.detach() for t in outputs), *(t.detach() for t in tensors(args)), *gradients]


def _parameters(fn: object) -> Iterator[torch.Tensor]:
    module = getattr(fn, "_orig_mod", fn)
    return iter(module.parameters()) if isinstance(module, nn.Module) else iter(())


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested tuples and lists, in order."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)


def differences(given: torch.Tensor, expected: torch.Tensor, kind: str) -> Iterator[str]:
    """One line for each way in which `given` isn't what eager gave; see `Case.outputs`."""
    for name in ("dtype", "shape"):
        a, b = getattr(given, name), getattr(expected, name)
        if a != b:
            yield f"{name} {a} for {b}"
            return
    if given.stride() != expected.stride() and given.numel() > 1:
        yield f"strides {given.stride()} for {expected.stride()}"
    if given.numel() == 0 or torch.equal(_bits(given), _bits(expected)):
        return
    if kind == "h":
        count = int((_bits(given) != _bits(expected)).sum())
        yield f"{count} of {given.numel()} elements differ in their bits"
    elif kind == "n":
        ulps = int((_ordered(given) - _ordered(expected)).abs().max())
        if ulps > 1:
            yield f"differs by {ulps} units in the last place"
    else:
        difference = (given.double() - expected.double()).abs().max()
        bound = _RELATIVE[given.dtype] * expected.double().abs().max()
        if not difference <= bound:
            yield f"differs by {float(difference):.3g}, allowed are {float(bound):.3g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_INTEGER[tensor.element_size()])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, so that neighbours differ by one."""
    bits = _bits(tensor).to(torch.int64)
    lowest = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)

"""Run cases on real ranks, compiled, and compare them with eager: what `spawn` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cases_graphs  # noqa: F401  (registers its cases, as do the following)
import cases_norms  # noqa: F401
import cases_reported  # noqa: F401
import cases_steps  # noqa: F401
import torch
from case_support import CASES, Case, Groups, make_groups
from graph_caches import compile_every_graph_again
from graph_support import compiled_op_by_op
from op_support import bits, ordered_bits
from torch import nn

import fx_fusion
from fx_fusion.report import FusionReport, Reason

#: Each case runs with both, if it has a site: eager's own order of adding up, and the CPU kernel.
KERNELS = ("unfused", "auto")
#: How far an fp32 norm may be from eager's. A sum of up to 128 squares has a relative error of up
#: to 4 eps with the kernel's tree of 64 lanes, about as much with eager's; the root halves
#: their sum, and three roundings follow.
_REORDERED_ULPS = 8
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
    rank: int, world_size: int, names: tuple[str, ...], dynamic: tuple[str, ...]
) -> dict[str, Outcome]:
    """Compile and run the cases `names`, and `dynamic` with dynamic=True, on every rank."""
    compile_every_graph_again()
    groups = make_groups(rank, world_size)
    found = {name: run_case(CASES[name], groups, rank, None) for name in names}
    for name in dynamic:
        found[f"{name}, dynamic"] = run_case(CASES[name], groups, rank, True)
    return found


def run_case(case: Case, groups: Groups, rank: int, dynamic: bool | None) -> Outcome:
    """One case: eager, then compiled for each kernel, on equal inputs."""
    fn, args = case.make(groups, rank)
    eager = _called(fn, args, case.train)
    kinds = case.outputs + "-" * (len(eager) - len(case.outputs))
    faults = []
    for kernel in KERNELS if case.fused and case.inductor else KERNELS[:1]:
        torch._dynamo.reset()
        fx_fusion.clear_reports()
        again, args = case.make(groups, rank)
        given = _called(_compiled(again, case, dynamic, kernel), args, case.train)
        report = FusionReport.merged(fx_fusion.reports())
        reasons = tuple(site.reason for site in report.sites if site.reason is not None)
        for index, (a, b, kind) in enumerate(zip(given, eager, kinds, strict=True)):
            found = differences(a, b, kind, reordered=kernel == "auto")
            faults += [f"{kernel}: output {index}: {fault}" for fault in found]
    return Outcome(report.fused_count, reasons, tuple(faults))


def _compiled(
    fn: Callable[..., Any], case: Case, dynamic: bool | None, kernel: str
) -> Callable[..., Any]:
    """With Inductor; a graph of which no site is fused is all Inductor's, and is run op by op."""
    if not (case.fused and case.inductor):
        return compiled_op_by_op(fn, dynamic=dynamic, kernel=kernel)
    # Where a site is left to Inductor, keep it from reading a result before its wait.
    options = fx_fusion.inductor_options(
        {"max_fusion_size": 1} if case.reasons else {}, kernel=kernel
    )
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


def differences(
    given: torch.Tensor, expected: torch.Tensor, kind: str, *, reordered: bool
) -> Iterator[str]:
    """One line for each way in which `given` isn't what eager gave; see `Case.outputs`.

    With `reordered` the squares were added up in another order than eager's.
    """
    for name in ("dtype", "shape"):
        a, b = getattr(given, name), getattr(expected, name)
        if a != b:
            yield f"{name} {a} for {b}"
            return
    if given.stride() != expected.stride() and given.numel() > 1:
        yield f"strides {given.stride()} for {expected.stride()}"
    if given.numel() == 0 or torch.equal(bits(given), bits(expected)):
        return
    if kind == "h":
        count = int((bits(given) != bits(expected)).sum())
        yield f"{count} of {given.numel()} elements differ in their bits"
    elif kind == "n":
        if given.dtype == torch.float64:  # a norm is computed in fp32
            given, expected = given.float(), expected.float()
        ulps = int((ordered_bits(given) - ordered_bits(expected)).abs().max())
        if ulps > (_REORDERED_ULPS if reordered and given.dtype == torch.float32 else 1):
            yield f"differs by {ulps} units in the last place"
    else:
        difference = (given.double() - expected.double()).abs().max()
        bound = _RELATIVE[given.dtype] * expected.double().abs().max()
        if not difference <= bound:
            yield f"differs by {float(difference):.3g}, allowed are {float(bound):.3g}"

"""What the GPU tests share: cases, inputs that differ by call, rank and row, and comparisons.

Every rank makes the inputs of all ranks from a seed, so that it can compute what is expected
without a collective, and compares on the device, so that calls follow each other closely.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from op_support import ordered_bits

from fx_fusion.lowering import gpu_build, gpu_kernel, gpu_local
from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.gpu_layout import rows_per_launch
from fx_fusion.lowering.gpu_loaded import has_programmatic_launch
from fx_fusion.lowering.gpu_variant import Variant, spread_of, variant_of
from fx_fusion.lowering.gpu_workspace import GpuWorkspace, gpu_workspace
from fx_fusion.lowering.reference import rank_order_reference
from fx_fusion.lowering.select import digest_of, forced_plan
from fx_fusion.settings import FusionSettings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: The plan that takes the kernel at every size.
OWN_KERNEL = digest_of(FusionSettings(kernel="fx_fusion"))
ALL = {"want_norm": True, "want_residual": True, "want_reduced": True, "want_rstd": True}
TOKENS = (1, 2, 3, 7, 8, 63, 64, 65, 128, 513)
MOST_ELEMENTS = 2**21


class Form(NamedTuple):
    """One spelling of a site: dtypes of its tensors (None where absent) and the op's options."""

    x: torch.dtype
    hidden: int
    residual: torch.dtype | None = None
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    options: Mapping[str, Any] = MappingProxyType({})


FORMS = (
    Form(BF16, 4096, BF16, BF16, None, {"norm_dtype": BF16}),
    Form(BF16, 2880, BF16, BF16),
    Form(BF16, 8192, None, BF16, BF16, {"norm_dtype": BF16, "want_residual": False}),
    Form(BF16, 7168, BF16, BF16, None, {"want_reduced": False, "want_rstd": False}),
    Form(BF16, 63, BF16, FP32, FP16, {"scale": 0.22}),
    Form(BF16, 5120, FP32, FP32, BF16, {"add_dtype": FP32, "out_dtype": BF16}),
    Form(FP16, 5120, FP16, FP16, FP16, {"reciprocal": "sqrt", "norm_dtype": FP16}),
    Form(FP16, 1032, BF16, BF16, None, {"weight_form": "1+w"}),
    Form(BF16, 16384, BF16, BF16, None, {"norm_dtype": BF16}),
    Form(FP32, 4096, FP32, FP32),
    Form(FP32, 2880, BF16, BF16, None, {"add_dtype": BF16, "scale": -1.5}),
    Form(FP32, 16384, FP32, None, None, {"reciprocal": "pow"}),
    Form(FP32, 63, None, FP32, FP32),
    Form(FP16, 63, FP32, None, None, {"out_dtype": FP16}),
    Form(BF16, 1032, BF16, BF16, None, {"weight_form": "1+w", "scale": 3.0}),
)


def random_tensor(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values with every twentieth a zero of either sign, and rows of other sizes."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    value = torch.randn(*shape, generator=generator, device="cuda")
    kind = torch.rand(*shape, generator=generator, device="cuda")
    value = torch.where(kind < 0.05, torch.where(kind < 0.025, -0.0, 0.0), value)
    if len(shape) == 2:
        value = value * torch.rand(shape[0], 1, generator=generator, device="cuda").add(0.1)
    return value.to(dtype)


def parts_of(form: Form, tokens: int, seed: int, world_size: int) -> list[torch.Tensor]:
    """The partial sums of all ranks."""
    return [
        random_tensor(1000 * seed + r, tokens, form.hidden, dtype=form.x)
        for r in range(world_size)
    ]


def algorithms(world_size: int) -> tuple[str, ...]:
    """The algorithms of a group; two ranks have one-shot alone."""
    return ("one-shot", "two-shot") if world_size > 2 else ("one-shot",)


def arguments_of(
    form: Form,
    x: torch.Tensor,
    seed: int,
    world_size: int,
    group_name: str,
    algorithm: str = "",
) -> Arguments:
    """The op's arguments for one call; by the algorithm that suits the size, or by this one."""
    start = 1000 * seed + 500

    def tensor(number: int, dtype: torch.dtype | None, *shape: int) -> torch.Tensor | None:
        return None if dtype is None else random_tensor(start + number, *shape, dtype=dtype)

    options = {**ALL, **form.options}
    options.setdefault("weight_form", "none" if form.weight is None else "w")
    return Arguments(
        x,
        tensor(1, form.residual, *x.shape),
        tensor(2, form.weight, form.hidden),
        tensor(3, form.bias, form.hidden),
        1e-6,
        group_name,
        world_size,
        plan=forced_plan(algorithm) if algorithm else OWN_KERNEL,
        **options,
    )


class Differences:
    """Counts of wrong elements, kept on the device until they are asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.counts: list[torch.Tensor] = []

    def compare(
        self, name: str, given: Results, arguments: Arguments, expected: Results
    ) -> None:
        """Reduced value and hidden state bit by bit, norm and rstd within their ulps."""
        norm_ulps = 8 if given.norm.dtype == FP32 else 1
        if arguments.norm_dtype not in (None, FP32) and arguments.weight is not None:
            norm_ulps = 2  # a flip of the last bit, then a product that doubles it
        allowed = {"norm": norm_ulps, "residual": 0, "reduced": 0, "rstd": 8}
        for field, most in allowed.items():
            if not getattr(arguments, f"want_{field}"):
                continue
            one, two = getattr(given, field), getattr(expected, field)
            assert (one.shape, one.dtype) == (two.shape, two.dtype), (name, field)
            apart = (ordered_bits(one) - ordered_bits(two)).abs()
            self.names.append(f"{name}: {field}")
            self.counts.append((apart > most).sum())

    def lines(self) -> list[str]:
        """One line for each comparison that failed."""
        if not self.counts:
            return ["nothing was compared"]
        found = torch.stack(self.counts).tolist()
        return [
            f"{name}: {count} elements"
            for name, count in zip(self.names, found, strict=True)
            if count
        ][:20]


def tokens_for(form: Form, choice: random.Random) -> int:
    """A number of tokens, small enough that a call takes little memory."""
    return choice.choice([t for t in TOKENS if t * form.hidden <= MOST_ELEMENTS])


def warm_up(forms: Sequence[Form], workspace: GpuWorkspace) -> None:
    """Compile and load what the forms need, each rank compiling a part; take memory.

    Ranks that share a GPU under MPS can neither load a kernel nor take memory while the kernel
    of another waits for them.
    """
    rank, size = workspace.group.rank(), workspace.group.size()
    clusters = has_programmatic_launch(workspace.arch)
    machine = gpu_local.machine_of(torch.cuda.current_device())
    assert machine is not None
    needed: dict[Variant, tuple[Arguments, int]] = {}
    for form, algorithm in itertools.product(forms, (*algorithms(size), "local")):
        most = max(TOKENS)
        if algorithm != "local":
            most = rows_per_launch(form.hidden, form.x.itemsize, size, algorithm)
        rows = {min(t, most) for t in TOKENS} | {t % most for t in TOKENS if t % most}
        x = torch.empty(1, form.hidden, dtype=form.x, device="cuda")
        arguments = arguments_of(form, x, 0, size, str(workspace.group.group_name))
        many = workspace.multiprocessors
        if algorithm == "local":
            arguments, many = arguments._replace(want_reduced=False), machine.multiprocessors
        for count in rows:
            spread = spread_of(arguments, count, many, clusters, algorithm)
            variant = variant_of(arguments, spread, algorithm)
            needed.setdefault(variant, (arguments, count))
    for number, variant in enumerate(sorted(needed)):
        if number % size == rank:
            gpu_build.machine_code(variant, workspace.arch)
    dist.barrier(workspace.group)
    for variant, (arguments, count) in needed.items():
        if variant.algorithm == "local":
            assert gpu_local.launcher_for(arguments, count, machine) is not None
        else:
            gpu_kernel.launcher_for(arguments, count, workspace, variant.algorithm)
    small = [torch.empty(2**19, dtype=torch.uint8, device="cuda") for _ in range(200)]
    large = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    del small, large
    torch.cuda.synchronize()
    dist.barrier(workspace.group)


def workspace_of(
    group: dist.ProcessGroup | None = None, forms: Sequence[Form] = FORMS
) -> GpuWorkspace:
    """The group's workspace, made now, with the kernels of these forms."""
    chosen = group or dist.group.WORLD
    assert chosen is not None
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = gpu_workspace(chosen, device)
    assert workspace.usable, workspace.refusal
    assert workspace.arch == device_arch(device)
    if not workspace.launchers:
        workspace.timeout_nanoseconds = 20_000_000_000  # a hang is to end the test soon
        if workspace.sharers > 1:
            # all ranks' blocks have to fit at once, of 16 too
            few = 2 if workspace.group.size() <= 8 else workspace.group.size()
            workspace.block_limit = max(8, workspace.multiprocessors // few)
        warm_up(forms, workspace)
    return workspace


def expected_of(parts: Sequence[torch.Tensor], arguments: Arguments) -> Results:
    """What the contract gives."""
    return rank_order_reference(parts, arguments)

"""Packages of AOTInductor: make one of two sites, run it in fresh processes, compare."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import fx_fusion

HIDDEN, TOKENS = 64, 4
LOADER = Path(__file__).with_name("aot_loader.py")
#: The package's C++ is compiled once and runs a few times.
QUICK = {
    "cpp.vec_isa_ok": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}


class TwoSites(nn.Module):
    """Two projections, each reduced, added and normed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / 8)
        self.second = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / 8)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the default group; here, under a fake group, its graph."""
        group = dist.group.WORLD
        assert group is not None
        summed: torch.Tensor = funcol.all_reduce(partial, "sum", group)
        return summed

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm behind the second site, and the residual stream."""
        residual = residual + self.reduce(x @ self.first)
        residual = residual + self.reduce(self.norm(residual) @ self.second)
        return self.norm(residual), residual


def compile_package(path: Path, device: str, is_dynamic: bool = False, **options: Any) -> None:
    """Export and package `TwoSites`; a group of the ranks' size must exist, fake or real."""
    model = TwoSites().eval().to(device)
    arguments = [torch.randn(TOKENS, HIDDEN, device=device) for _ in range(2)]
    with torch.no_grad():
        tokens = torch.export.Dim("tokens", max=4096)
        sizes = ({0: tokens}, {0: tokens}) if is_dynamic else None
        exported = torch.export.export(model, tuple(arguments), dynamic_shapes=sizes)
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(path),
            inductor_configs=fx_fusion.inductor_options(QUICK, **options),
        )


def write_calls(
    folder: Path, world_size: int, tokens: Sequence[int] = (TOKENS,) * 3
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write the arguments of each call and rank; returns what eager makes of them, in fp64.

    Args:
        folder: Where.
        world_size: Ranks.
        tokens: Of each call.
    """
    generator = torch.Generator().manual_seed(5)
    model = TwoSites().double()
    calls: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(world_size)]
    expected = []
    for rows in tokens:
        parts = torch.randn(world_size, rows, HIDDEN, generator=generator)
        residual = torch.randn(rows, HIDDEN, generator=generator)
        for rank in range(world_size):
            calls[rank].append((parts[rank], residual))
        with torch.no_grad():
            hidden = residual.double() + sum(part.double() @ model.first for part in parts)
            hidden = hidden + world_size * (model.norm(hidden) @ model.second)
            expected.append((model.norm(hidden), hidden))
    torch.save(calls, folder / "calls.pt")
    return expected


def code_of(path: Path) -> str:
    """The C++ of a package's calls."""
    with zipfile.ZipFile(path) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".wrapper.cpp"))
        code = package.read(name).decode()
    return code[code.index("::run_impl(") : code.index("::run_impl\n")]


def run_package(folder: Path, world_size: int, device: str) -> list[dict[str, Any]]:
    """Run folder/model.pt2 on calls.pt in fresh processes; what each rank found."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONFAULTHANDLER"] = "1"  # a crash of a rank says where
    environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    words = [str(world_size), str(folder), device]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(LOADER), str(rank), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, f"exit status {rank.returncode}: {output}"
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def differences(
    ranks: list[dict[str, Any]], expected: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[str]:
    """What is wrong with the ranks' results: too far from fp64, or not the same bits."""
    wrong = []
    for number, pair in enumerate(expected):
        for index, exact in enumerate(pair):
            given = [rank["results"][number][index] for rank in ranks]
            apart = float((given[0].double() - exact).abs().max())
            if not apart < 2e-5:  # a few times 2^-24, for values up to 4 and sums of 64
                wrong.append(f"call {number}, output {index}: {apart:.1e} from fp64")
            if not all(torch.equal(given[0], other) for other in given):
                wrong.append(f"call {number}, output {index}: the ranks differ")
    return wrong

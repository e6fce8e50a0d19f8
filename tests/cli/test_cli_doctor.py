"""`fx-fusion doctor`: each group of checks on machines as they may be, and ranks that differ."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doctor_ranks import examined
from typer.testing import CliRunner

from fx_fusion import compat
from fx_fusion.cli.app import app
from fx_fusion.cli.doctor import show
from fx_fusion.doctor import (
    compilers,
    devices,
    examination,
    host,
    installation,
    ranks,
    versions,
)
from fx_fusion.doctor.check import Check, numbers_of, run_checks
from fx_fusion.lowering import toolchain
from fx_fusion.lowering.toolchain import Found
from fx_fusion.testing import spawn

RUNNER = CliRunner()
NVIDIA = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""
AMD = """\
=================== Link Type between two GPUs ===================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0
"""


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def only(checks: list[Check]) -> Check:
    assert len(checks) == 1, checks
    return checks[0]


def give_gpus(monkeypatch: pytest.MonkeyPatch, names: list[str], barred: set[Any]) -> None:
    """Let torch see GPUs of these names; `barred` pairs can't reach each other."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(cuda, "get_device_name", lambda index: names[index])
    properties = SimpleNamespace(
        total_memory=80 * 2**30, major=9, minor=0, gcnArchName="gfx942:sramecc+"
    )
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(
        cuda, "can_device_access_peer", lambda one, other: (one, other) not in barred
    )


def give_tool(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[..., Any]) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool if tool == name else None)
    monkeypatch.setattr(subprocess, "run", run)


def prints(text: str) -> Callable[..., Any]:
    return lambda command, **_: SimpleNamespace(stdout=text)


def test_here_every_line_has_a_status_and_each_bad_one_a_remedy() -> None:
    done = RUNNER.invoke(app, ["doctor", "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == (1 if document["status"] == "fail" else 0)
    lines = by_name([Check(**line) for line in document["checks"]])
    assert lines.keys() >= {"torch", "entry point", "CPU kernel", "kernel cache", "cores"}
    assert [c.name for c in lines.values() if c.status != "ok" and not c.remedy] == []
    assert lines["torch"].text.startswith(torch.__version__)
    if lines["CPU kernel"].status == "ok":
        assert "in 0 files" not in lines["kernel cache"].text


def test_a_failed_check_makes_exit_status_1_and_its_remedy_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = Check("thing", "fail", "it is [broken]", "Mend it.")
    monkeypatch.setattr(examination, "CHECKS", (lambda: [failed],))
    done = RUNNER.invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["fail", "thing", "it", "is", "[broken]"],
        ["->", "Mend", "it."],
        ["0", "ok,", "0", "to", "look", "at,", "1", "failed"],
    ]


def test_long_texts_are_wrapped_not_cut_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    show([Check("thing", "warn", "word " * 60, "remedy " * 40)], as_json=False)
    out = capsys.readouterr().out
    assert (out.count("word"), out.count("remedy")) == (60, 40)
    assert max(map(len, out.splitlines())) <= 100


def test_a_check_that_raises_is_a_warning_and_the_others_are_seen() -> None:
    def broken_check() -> list[Check]:
        raise RuntimeError("no such driver")

    found = run_checks([broken_check, lambda: [Check("next", "ok", "fine")]])
    assert [check.status for check in found] == ["warn", "ok"]
    assert found[0].name == "broken check"
    assert "RuntimeError: no such driver" in found[0].text


def test_two_real_ranks_name_the_one_that_differs_and_in_what() -> None:
    results = spawn(examined, 2, timeout=100, args=(1,))
    assert results[0] == results[1]
    lines = by_name(results[0])
    different = [name for name in lines if name.startswith("ranks differ")]
    assert different == ["ranks differ: switch"]
    odd = lines["ranks differ: switch"]
    assert odd.status == "fail"
    assert "rank 1 has: FX_FUSION_DISABLE=1" in odd.text
    assert odd.remedy


def test_the_odd_one_out_of_many_is_named_against_the_others() -> None:
    def rank_of(version: str) -> list[Check]:
        status: Any = "warn" if version == "2.12" else "ok"
        return [Check("torch", status, version, "Update it.", shared=version)]

    lines = ranks.merged([rank_of("2.13"), rank_of("2.13"), rank_of("2.12"), rank_of("2.13")])
    assert [(line.status, line.text) for line in lines] == [
        ("ok", "2.13"),
        ("warn", "rank 2: 2.12"),
        ("fail", "rank 2 has: 2.12; the other 3 have: 2.13"),
    ]
    even = ranks.merged([rank_of("2.13"), rank_of("2.14"), rank_of("2.14"), rank_of("2.13")])
    assert even[-1].text == "ranks 0, 3 have: 2.13; ranks 1, 2 have: 2.14"
    missing = ranks.merged([rank_of("2.13"), [], rank_of("2.13")])
    assert "rank 1 has: nothing to check" in missing[-1].text
    agreed = ranks.merged([rank_of("2.13")] * 2)
    assert agreed[-1].text == "all 2 agree in what they have to"


def test_a_rank_that_never_comes_is_a_failure_within_the_time_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examination, "CHECKS", ())
    address = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    done = RUNNER.invoke(app, ["doctor", "--timeout", "1", "--json"])
    assert done.exit_code == 1
    lost = json.loads(done.stdout)["checks"][-1]
    assert lost["text"].startswith("not all 2 ranks met within 1 s")
    assert "MASTER_ADDR" in lost["remedy"]


@pytest.mark.parametrize(
    ("installed", "name", "status", "part"),
    [
        ({}, "FlashInfer", "ok", "not installed"),
        ({"flashinfer-python": "0.7.4"}, "FlashInfer", "ok", "0.7.4"),
        ({"flashinfer-python": "0.7.2"}, "FlashInfer", "warn", "two-shot races"),
        ({"flashinfer-python": "0.6.12"}, "FlashInfer", "warn", "2880"),
        ({"amd-aiter": "0.1.7.post2.dev18"}, "AITER", "warn", "wrong results"),
        ({"amd-aiter": "0.1.20"}, "AITER", "ok", "0.1.20"),
        ({"aiter": "0.13"}, "AITER", "warn", "unrelated"),
    ],
)
def test_known_bad_versions_of_other_libraries_are_named(
    monkeypatch: pytest.MonkeyPatch,
    installed: Mapping[str, str],
    name: str,
    status: str,
    part: str,
) -> None:
    monkeypatch.setattr(versions, "installed", lambda package: installed.get(package, ""))
    found = by_name(versions.other_libraries())[name]
    assert found.status == status
    assert part in found.text
    assert bool(found.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.0", "fail"), ("2.11.0", "ok"), ("2.15.1+cu130", "ok"), ("2.16.0", "warn")],
)
def test_torch_outside_the_known_releases_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    monkeypatch.setattr(compat, "versions", lambda: (version, "3.6"))
    assert by_name(versions.torch_and_triton())["torch"].status == status


def test_rocm_before_10_1_is_named_for_its_symmetric_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    assert by_name(versions.torch_and_triton())["HIP"].status == "warn"
    monkeypatch.setattr(torch.version, "hip", "10.1.0")
    assert "HIP" not in by_name(versions.torch_and_triton())


def test_versions_are_compared_by_number() -> None:
    assert numbers_of("0.7.2.post1") == (0, 7, 2, 1)
    assert numbers_of("2.13.0+cu130") == (2, 13, 0)


def test_without_a_gpu_or_with_a_broken_driver_the_checks_of_gpus_say_so_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> int:
        raise RuntimeError("driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", broken)
    assert only(devices.gpus()).shared == "none"
    assert devices.peer_access() == devices.links() == devices.symmetric_memory() == []


def test_gpus_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, ["H200", "H200"], set())
    assert only(devices.gpus()) == Check(
        "GPUs", "ok", "2 x H200, 80 GiB", shared="2 x H200, 80 GiB"
    )
    assert only(devices.peer_access()).status == "ok"
    give_gpus(monkeypatch, ["H200", "A100"], {(1, 0)})
    assert only(devices.gpus()).text == "of several kinds: 1 x H200, 80 GiB; 1 x A100, 80 GiB"
    barred = only(devices.peer_access())
    assert (barred.status, barred.text) == ("warn", "none from GPU 1 to 0")


def test_links_are_read_from_what_the_vendor_s_tool_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert devices.parse_topology(NVIDIA)[0] == ["X", "NV18", "SYS"]
    assert devices.parse_topology(AMD) == [["0", "XGMI"], ["XGMI", "0"]]
    assert devices.parse_topology("no GPU here") == []
    give_gpus(monkeypatch, ["H200"] * 3, set())
    give_tool(monkeypatch, "nvidia-smi", prints(NVIDIA))
    mixed = only(devices.links())
    assert (mixed.status, mixed.text) == ("warn", "NV18 between 0-1; SYS between 0-2, 1-2")
    give_tool(monkeypatch, "rocm-smi", prints(AMD))
    assert only(devices.links()).text == "XGMI between all GPUs"
    give_tool(monkeypatch, "nvidia-smi", prints(""))
    assert "no matrix" in only(devices.links()).text

    def late(command: Any, **_: Any) -> Any:
        raise subprocess.TimeoutExpired("nvidia-smi", 30)

    give_tool(monkeypatch, "nvidia-smi", late)
    assert only(devices.links()).remedy == "Run nvidia-smi topo -m by hand."
    give_tool(monkeypatch, "none", prints(""))
    assert "no tool" in only(devices.links()).text


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_symmetric_memory_that_cannot_be_had_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_gpus(monkeypatch, ["H200"], set())
    assert only(devices.symmetric_memory()).status == "warn"
    assert devices.rendezvous("no such group").status == "warn"


def test_little_shared_memory_fails_only_where_memfd_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = SimpleNamespace(f_frsize=4096, f_blocks=4096, f_bavail=1024)
    monkeypatch.setattr(os, "statvfs", lambda folder: small)
    found = only(host.shared_memory())
    assert (found.status, found.text) == (
        "ok",
        "memfd works; /dev/shm has 4 of 16 MiB free",
    )

    def none(*_: Any) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", none)
    found = only(host.shared_memory())
    assert found.status == "fail"
    assert "--shm-size" in found.remedy


def test_more_threads_than_cores_are_named_with_the_number_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(host, "_quota", lambda: 4.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = only(host.cores())
    assert found.status == "warn"
    assert "may use 4; ranks here: 2, threads of each: 4" in found.text
    assert "OMP_NUM_THREADS=2" in found.remedy
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert "use fewer" in only(host.cores()).remedy


def test_a_machine_without_compiler_or_nvrtc_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain, "cpu_compiler", lambda: "")
    monkeypatch.setattr(
        toolchain, "cpu_kernel", lambda: Found(cause="no C++ compiler was found")
    )
    monkeypatch.setattr(toolchain, "nvrtc", lambda: Found(cause="it isn't installed"))
    monkeypatch.setattr(compilers, "gpu_count", lambda: 0)
    compiler = by_name(compilers.host_compiler())["C++ compiler"]
    assert compiler.status == "fail"
    assert "apt-get install g++" in compiler.remedy
    assert only(compilers.cpu_kernel()).status == "fail"
    assert only(compilers.nvrtc()).status == "ok"
    chosen = only(installation.chosen_kernel())
    assert "no C++ compiler was found" in chosen.text
    monkeypatch.setattr(compilers, "gpu_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-cuda-nvrtc==13.*" in only(compilers.nvrtc()).remedy
    assert only(compilers.cpu_kernel()).status == "warn"


def test_a_rocm_build_is_asked_for_hiprtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(compilers, "gpu_count", lambda: 1)
    monkeypatch.setattr(toolchain, "hiprtc", lambda: Found("7.1"))
    found = only(compilers.nvrtc())
    assert (found.name, found.status, found.text) == ("hipRTC", "ok", "7.1")
    monkeypatch.setattr(toolchain, "hiprtc", lambda: Found(cause="it can't be loaded"))
    found = only(compilers.nvrtc())
    assert (found.status, found.text) == ("warn", "it can't be loaded")
    assert found.remedy


def test_the_cache_is_counted_and_must_be_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain, "kernel_cache", lambda: tmp_path / "fx" / "cache")
    assert "0.0 MiB in 0 files" in only(compilers.kernel_cache()).text
    (tmp_path / "fx" / "cache").mkdir(parents=True)
    (tmp_path / "fx" / "cache" / "one.so").write_bytes(b"x" * 2**20)
    assert "1.0 MiB in 1 files" in only(compilers.kernel_cache()).text
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = only(compilers.kernel_cache())
    assert found.status == "fail"
    assert "TORCHINDUCTOR_CACHE_DIR" in found.remedy


def test_a_missing_entry_point_and_a_wrong_switch_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(installation.entry_point()).status == "ok"
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert only(installation.entry_point()).status == "fail"
    for value, status in (("0", "ok"), ("1", "warn"), ("perhaps", "fail")):
        monkeypatch.setenv("FX_FUSION_DISABLE", value)
        assert only(installation.switched_off()).status == status

"""hipRTC and the HIP runtime get the calls they should, as a stand-in for both writes them down."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_ranks import Group
from kernel_registers import variant_for

import fx_fusion
from fx_fusion.lowering import (
    driver,
    gpu_build,
    gpu_driver,
    gpu_kernel,
    hip_driver,
    runtime_compiler,
)
from fx_fusion.lowering import (
    gpu_workspace as gpu_workspace_module,
)
from fx_fusion.lowering import (
    workspace as prepared,
)
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.lowering.gpu_driver import DriverError
from fx_fusion.lowering.gpu_select import AMD_ARCHS
from fx_fusion.lowering.gpu_workspace import GpuWorkspace
from fx_fusion.lowering.runtime_compiler import BuildError, RuntimeCompiler, rocm_library
from fx_fusion.testing import fake_group

SOURCE = Path(__file__).with_name("stub_hip.c")

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hip") / "libstub.so"
    command = [compiler(), "-x", "c", "-O1", "-w", "-shared", "-fPIC", str(SOURCE)]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=120)
    return target


@pytest.fixture
def stub(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def found(name: str) -> list[str]:
        assert name == "amdhip64"
        return ["/nowhere/libamdhip64.so", str(library)]

    monkeypatch.setattr(hip_driver, "rocm_library", found)
    hip_driver._runtime.cache_clear()
    made: Any = ctypes.CDLL(str(library))
    made.stub_written.restype = ctypes.c_char_p
    made.stub_reset(0)
    yield made
    hip_driver._runtime.cache_clear()


def written(stub: Any) -> list[str]:
    lines: list[str] = stub.stub_written().decode().splitlines()
    stub.stub_reset(0)
    return lines


def function(**options: Any) -> hip_driver.Function:
    given = {"threads": 256, "cluster": 1, "programmatic": False, "context": ctypes.c_void_p()}
    return hip_driver.Function(b"code", "the_kernel", **{**given, **options})


def test_a_kernel_is_loaded_asked_about_and_launched(stub: Any) -> None:
    loaded = function()
    assert written(stub) == ["mode 2", "load code", "function 0x11 the_kernel", "mode 0"]
    assert loaded.clusters_at_once(104) == 208
    assert written(stub) == ["occupancy 0x22 256 0"]
    value = ctypes.c_int(41)
    loaded.launch(7, 0x1234567890, (ctypes.c_void_p * 1)(ctypes.addressof(value)))
    assert written(stub) == ["launch 0x22 7 1 1, 256 1 1, 0 0x1234567890 41 (nil)"]


def test_the_device_and_a_capture_are_asked_for(stub: Any) -> None:
    assert hip_driver.current_context().value == 3
    assert [hip_driver.is_capturing(stream) for stream in (4, 5)] == [False, True]


def test_errors_are_in_the_runtime_s_words(stub: Any) -> None:
    loaded = function()
    stub.stub_reset(98)
    with pytest.raises(DriverError, match=r"hipModuleLaunchKernel: invalid function \(98\)"):
        loaded.launch(1, 0, (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_int())))
    for options in ({"cluster": 2}, {"programmatic": True}):
        with pytest.raises(DriverError, match="neither clusters nor programmatic launch"):
            function(**options)


def test_a_machine_without_the_runtime_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_driver, "rocm_library", lambda name: ["/nowhere/libamdhip64.so"])
    hip_driver._runtime.cache_clear()
    with pytest.raises(DriverError, match=r"HIP runtime can't be loaded: .*nowhere"):
        hip_driver.current_context()


@pytest.mark.parametrize(
    ("algorithm", "rows", "launches"), [("one-shot", 3, [3]), ("two-shot", 1000, [512, 488])]
)
def test_a_call_of_a_rank_on_an_amd_gpu_is_launched_through_hip(
    algorithm: str, rows: int, launches: list[int], stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_build, "machine_code", lambda variant, arch: arch.encode())
    host = torch.zeros(17, dtype=torch.int32)
    workspace = GpuWorkspace(
        Group(1, 4),  # type: ignore[arg-type]
        torch.device("cpu"),
        arch="gfx942",
        multiprocessors=304,
        addresses=(4096, 8192, 12288, 16384),
        _host=host,
    )
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
    arguments = Arguments(x, x, x[0], None, 1e-6, "", 4, want_residual=True)
    gpu_kernel.enqueue(arguments, workspace, 0x99, algorithm)
    lines = written(stub)
    entry = gpu_build.KERNELS[algorithm].entry
    assert [line for line in lines if "load" in line or "function" in line] == [
        *("load gfx9", f"function 0x11 {entry}"),
    ]
    assert [line.split(",")[0] for line in lines if line.startswith("launch")] == [
        f"launch 0x22 {count} 1 1" for count in launches
    ]
    assert {line.split(",")[1] for line in lines if line.startswith("launch")} == {" 512 1 1"}


@pytest.fixture
def hiprtc(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RuntimeCompiler("hipRTC", "hiprtc", "Code", lambda: [str(library)])
    monkeypatch.setattr(gpu_build, "HIPRTC", made)


@pytest.mark.usefixtures("hiprtc")
@pytest.mark.parametrize("algorithm", gpu_build.KERNELS)
def test_hiprtc_compiles_a_variant(
    algorithm: str, stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_build, "cache_folder", lambda: tmp_path)
    variant = variant_for(algorithm, "gfx942", 8, torch.bfloat16, "usual", 4096, 8)
    assert variant.cluster == 1
    assert gpu_build.machine_code(variant, "gfx942") == b"co\0e"
    create, compiled, destroy = written(stub)
    texts = gpu_build.sources()
    headers = [f"{name}={len(texts[name].encode())}" for name in gpu_build.HEADERS]
    assert create.split() == ["create", gpu_build.KERNELS[algorithm].source, "1", *headers]
    options = ["--offload-arch=gfx942", "-std=c++17", "-O3", "-ffp-contract=off"]
    assert compiled.split() == ["compile", "0x77", *options, *variant.macros()]
    assert destroy == "destroy 0x77"
    # from now on it is on disk
    assert [path.suffix for path in tmp_path.iterdir()] == [".gfx942"]
    assert gpu_build.machine_code(variant, "gfx942") == b"co\0e"
    assert written(stub) == []


@pytest.mark.usefixtures("hiprtc")
def test_what_hiprtc_refuses_is_shown_with_its_log(stub: Any) -> None:
    compiler = gpu_build.compiler_for("gfx942")
    compiler.compile("", "a.cu", {}, ())
    library: Any = compiler._library
    library.hiprtcCompileProgram = lambda *given: 6
    with pytest.raises(BuildError, match=r"hipRTC 7\.1: no such x"):
        compiler.compile("", "a.cu", {}, ())


def test_the_version_of_torch_s_own_compiler_is_told(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RuntimeCompiler("hipRTC", "hiprtc", "Code", lambda: [str(library)])
    monkeypatch.setattr(gpu_build, "HIPRTC", made)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert gpu_build.compiler_version() == "hipRTC 7.1"


def test_the_library_in_use_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = "/opt/rocm-7/lib/libamdhip64.so.7"
    maps = (
        f"7f0000000000-7f0000001000 r-xp 00000000 08:01 42   {loaded}\n7f00-7f01 rw-p 0 0:0 0\n"
    )
    (tmp_path / "libamdhip64.so").touch()
    monkeypatch.setattr(runtime_compiler, "_LOADED", tmp_path / "maps")
    monkeypatch.setattr(runtime_compiler, "_TORCH_LIBRARIES", tmp_path)
    (tmp_path / "maps").write_text(maps)
    assert rocm_library("amdhip64") == [
        *(loaded, str(tmp_path / "libamdhip64.so")),
        *("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"),
    ]


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_prepare_makes_nothing_on_amd_unless_the_kernels_are_turned_on(
    arch: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []

    def gpu_workspace(group: Any, device: torch.device) -> GpuWorkspace:
        made.append(str(device))
        return GpuWorkspace(group, device, "it is a test")

    monkeypatch.setattr(prepared, "device_arch", lambda device: arch)
    monkeypatch.setattr(gpu_workspace_module, "gpu_workspace", gpu_workspace)
    with fake_group(2):
        assert not fx_fusion.prepare(device="cuda:1")
        assert made == []
        assert f"have not been run on {arch} yet" in caplog.text
        assert not fx_fusion.prepare(device="cuda:1", kernel="fx_fusion")
    assert made == ["cuda:1"]


def test_the_driver_goes_with_the_arch() -> None:
    assert driver.driver_for("gfx90a") is hip_driver
    assert driver.driver_for("sm_90") is gpu_driver

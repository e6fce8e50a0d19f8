"""`examples/multi_gpu_run.sh` without its GPUs: its commands exist, and it goes on after a failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_jobs import EXAMPLES

from fx_fusion.bench import common, decode, kernels

SCRIPT = EXAMPLES / "multi_gpu_run.sh"
TEXT = SCRIPT.read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")

#: In place of Python: says there are GPUs, notes each command, fails the tests alone.
STUB = """#!/usr/bin/env bash
case "$*" in
*device_count*) echo "$STUB_GPUS" ;;
"-c import typer"*) exit 1 ;;
-) cat >/dev/null; echo "a machine" ;;
*) echo "$NCCL_NVLS_ENABLE $TORCH_SYMM_MEM_DISABLE_MULTICAST $*" >>"$STUB_LOG"
   [[ $* != "-m pytest "* ]] ;;
esac
"""


def run(folder: Path, gpus: int, **more: str) -> tuple[int, str, list[str]]:
    """The script's exit status, its output, and the commands it gave to Python."""
    stub, log = folder / "python", folder / "log"
    stub.write_text(STUB)
    stub.chmod(0o755)
    log.touch()
    environment = {**os.environ, "PYTHON": str(stub), "STUB_LOG": str(log)} | more
    environment["STUB_GPUS"] = str(gpus)
    done = subprocess.run(
        ["bash", str(SCRIPT), str(folder / "results")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


def test_it_goes_on_after_a_failed_step_and_names_it(tmp_path: Path) -> None:
    status, output, commands = run(tmp_path, 4)
    assert (status, output.splitlines()[-1]) == (1, "failed: tests")
    ran = [command.split()[3] for command in commands]
    benches = ["fx_fusion.bench.kernels", "fx_fusion.bench.decode"]
    assert ran == ["fx_fusion.doctor", "pytest", *benches, *benches]
    assert all(command.startswith("0 1 ") for command in commands)
    sizes = [re.findall(r"--world-size (\d)", command) for command in commands[2:]]
    assert sizes == [["2"], ["2"], ["4"], ["4"]]
    assert "replays_with) and not [6- and not -6] and not [8- and not -8] tests" in commands[1]
    texts = {path.name for path in (tmp_path / "results").iterdir()}
    assert {"doctor.txt", "tests.txt", "kernels_2.txt", "decode_4.txt"} <= texts


def test_the_steps_limits_end_it_in_under_8_minutes(tmp_path: Path) -> None:
    status, output, commands = run(tmp_path, 2, LIMIT="10")
    assert status == 1
    assert commands == []
    assert output.splitlines()[-1] == "failed: doctor tests kernels_2 decode_2"
    assert int(re.findall(r"LIMIT:-(\d+)", TEXT)[0]) + 5 < 480


def test_with_one_gpu_or_no_folder_it_says_what_is_missing(tmp_path: Path) -> None:
    status, output, commands = run(tmp_path, 1)
    assert (status, commands) == (2, [])
    assert "sees 1 GPU(s); this needs 2 or more" in output
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "usage: examples/multi_gpu_run.sh FOLDER" in done.stderr


def test_the_commands_it_names_exist_and_take_its_options() -> None:
    joined = TEXT.replace("\\\n", " ")
    for bench in (kernels.BENCH, decode.BENCH):
        command = re.findall(rf"-m fx_fusion\.bench\.{bench.module} (.*)", joined)[0]
        words = re.sub(r"\$\(\(.*?\)\)", "60", command)
        words = re.sub(r"\"\$world\"", "2", words).replace('"', "")
        words = words.replace("$tokens", "1,8").replace("$hidden", "2880")
        options = common.parser_of(bench, "").parse_args(words.split())
        assert (options.world_size, options.timeout) == (2, 60)
    for path in re.findall(r"tests/\S+", TEXT):
        assert (EXAMPLES.parent / path).exists()
    done = subprocess.run(
        [sys.executable, "-m", "fx_fusion.doctor"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1), done.stderr
    assert re.search(r"^ok +fx_fusion: ", done.stdout, re.MULTILINE)


def test_with_two_gpus_no_test_of_more_ranks_is_chosen(tmp_path: Path) -> None:
    command = run(tmp_path, 2)[2][1]
    found = re.fullmatch(r".*-q -m gpu -k (.*?) (tests/gpu/\S+) (tests/gpu/\S+)", command)
    assert found is not None
    words = ["--collect-only", "-q", "-m", "gpu", "-k", found[1], found[2], found[3]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    names = {line.split("::")[1] for line in done.stdout.splitlines() if "::" in line}
    assert {"test_job[large_calls-2]", "test_ranks[2-graphs]"} <= names
    assert "test_replays_with_inputs_that_change" in names
    assert not [name for name in names if re.search(r"\[([3-9]|16)-|-([3-9]|16)\]", name)]

"""The examples run: all of them on two ranks, some by the command that their docstring gives."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_jobs import EXAMPLES, run_examples

from fx_fusion.errors import SpawnError
from fx_fusion.testing import spawn

#: Not examples themselves.
HELPERS = ("launch",)
NAMES = tuple(p.stem for p in sorted(EXAMPLES.glob("*.py")) if p.stem not in HELPERS)
#: Those that compile for the ranks they run on; the others need none.
ON_RANKS = tuple(n for n in NAMES if n not in ("draw_before_after", "test_block_snapshot"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One compile cache for all; without a trial of vector code, C++ compiles sooner."""
    chosen = {
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in chosen.items():
            patch.setenv(name, value)
        yield {**os.environ, **chosen}


@pytest.fixture(scope="module")
def texts(environment: dict[str, str]) -> dict[str, str]:
    """What each example prints on rank 0."""
    names = tuple(name for name in ON_RANKS if name != "hf_llama_tp")
    results: list[dict[str, str]] = spawn(run_examples, 2, timeout=400, args=(names,))
    return results[0]


def run(*command: str, environment: dict[str, str]) -> str:
    """What a Python command prints; fails the test unless it succeeds."""
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def largest_difference(text: str) -> float:
    """The largest of the differences that an example prints."""
    found = re.findall(r"largest difference from eager[^:]*: (\S+)", text)
    return max(map(float, found))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that the examples share."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("launch")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_a_main_and_says_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert f"python examples/{name}.py" in (ast.get_docstring(tree) or "")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"python examples/{name}.py" in listed
    # The picture's example draws; it isn't meant to be copied.
    assert name == "draw_before_after" or len(text.splitlines()) <= 80


@pytest.mark.parametrize("name", [name for name in ON_RANKS if name != "hf_llama_tp"])
def test_an_example_fuses_and_agrees_with_eager(name: str, texts: dict[str, str]) -> None:
    assert "1 of 1 site fused" in texts[name]
    assert largest_difference(texts[name]) < 1e-5


def test_the_own_pass_turns_an_unfused_site_into_a_fused_one(texts: dict[str, str]) -> None:
    without, beside = texts["own_inductor_pass"].split("with it:")
    assert "unsupported_step (op=aten.clamp" in without
    assert "1 of 1 site fused" in beside


def test_a_training_step_leaves_the_gradient_s_all_reduce(texts: dict[str, str]) -> None:
    assert "backward: 1 all_reduce of a gradient is left alone" in texts["training_step"]


def test_an_example_starts_its_own_processes(environment: dict[str, str]) -> None:
    printed = run(str(EXAMPLES / "plain_block.py"), environment=environment)
    assert printed.startswith("1 of 1 site fused")
    assert largest_difference(printed) < 1e-5


def test_the_hugging_face_example_runs_under_torchrun(environment: dict[str, str]) -> None:
    printed = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        str(EXAMPLES / "hf_llama_tp.py"),
        environment=environment,
    )
    assert "model.layers.3.mlp.down_proj" in printed
    assert printed.count("9 of 9 sites fused") == 1, "rank 0 alone prints"
    assert largest_difference(printed) < 1e-5


def test_wrong_numbers_give_exit_status_1(
    launch: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = torch.ones(4)
    assert launch.compare(one, one.clone()) == "largest difference from eager: 0.00e+00"
    for wrong in (one * 1.001, one * float("nan")):
        with pytest.raises(AssertionError, match="from eager, more than"):
            launch.compare([one, wrong], [one, one])

    def failing_spawn(*args: Any, **kwargs: Any) -> Any:
        raise SpawnError("rank 1: 1.00e-03 from eager")

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(launch, "spawn", failing_spawn)
    assert launch.run(lambda device: "") == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "rank 1: 1.00e-03 from eager\n")


def test_the_snapshot_example_passes(launch: Any) -> None:
    del launch  # it puts the folder on the path
    module: Any = importlib.import_module("test_block_snapshot")
    module.test_the_block_is_one_op_after_the_pass()
    module.test_every_all_reduce_is_fused()


def test_the_picture_shows_one_op_where_there_were_eleven(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    path = tmp_path / "picture.svg"
    run(str(EXAMPLES / "draw_before_after.py"), str(path), environment=environment)
    texts = [node.text for node in ElementTree.parse(path).iter() if node.tag.endswith("}text")]
    # The matrix product stays in both.
    assert {"before: 12 ops", "after: 2 ops"} <= set(texts)
    assert texts.count("mm") == 2
    assert texts.count("all_reduce_add_rms_norm") == 1
    assert texts.count("all_reduce") == 1

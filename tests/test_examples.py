"""The examples run, each by the command its docstring gives."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(*command: str, cache: Path) -> str:
    """What a Python command prints; fails the test unless it succeeds."""
    done = subprocess.run(
        [sys.executable, *command],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            # Without a trial of vector code, C++ compiles sooner.
            "TORCHINDUCTOR_VEC_ISA_OK": "0",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_has_a_main_and_says_how_it_is_run(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert f"examples/{path.name}" in (ast.get_docstring(tree) or "")


def test_the_picture_shows_one_op_where_there_were_eleven(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    run(str(EXAMPLES / "draw_before_after.py"), str(path), cache=tmp_path)
    texts = [node.text for node in ElementTree.parse(path).iter() if node.tag.endswith("}text")]
    # The matrix product stays in both.
    assert {"before: 12 ops", "after: 2 ops"} <= set(texts)
    assert texts.count("mm") == 2
    assert texts.count("all_reduce_add_rms_norm") == 1
    assert texts.count("all_reduce") == 1


def test_the_hugging_face_example_runs_under_torchrun(tmp_path: Path) -> None:
    printed = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        str(EXAMPLES / "hf_llama_tp.py"),
        cache=tmp_path,
    )
    assert "model.layers.3.mlp.down_proj" in printed
    difference = float(printed.split("largest difference from eager:")[1])
    assert 0 <= difference < 1e-5

"""`fx-fusion explain`: what it prints for a user's file and a config, and what it refuses how."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from explained_models import LLAMA, written
from typer.testing import CliRunner

from fx_fusion import measured
from fx_fusion.cli.app import app

RUNNER = CliRunner()
CPU = ("--arch", "cpu", "--world-size", "4")


def explain(*arguments: str, status: int = 0) -> str:
    """What the command prints; on stderr where it fails."""
    result = RUNNER.invoke(app, ["explain", *arguments])
    assert result.exit_code == status, result.output
    return result.stderr if status == 2 else result.stdout


def explained(*arguments: str) -> Any:
    return json.loads(explain(*arguments, "--json"))


def saved_milliseconds(tokens: int) -> str:
    """What the committed measurement of one site of 4 ranks says."""
    cell = measured.lookup("cpu", 4, "bfloat16", 4096, tokens).cell
    assert cell is not None
    assert cell.unfused - cell.fused > 1000
    return f"{(cell.unfused - cell.fused) / 1000:.3g}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("explain"))


def test_the_command_prints_sites_once_and_kernels_by_tokens(model: str) -> None:
    # a relative path: lines are as long as the names in them
    folder, name = Path(model).parent, Path(model).name
    command = [sys.executable, "-m", "fx_fusion.cli", "explain", f"{name}:build", *CPU]
    done = subprocess.run(
        [*command, "--tokens", "1,512,4096"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "1 of 1 site fused" in done.stdout
    assert done.stdout.count("users_model.py:17 in forward") == 1
    assert "over 4 ranks, group '0', with 4096 tokens" in done.stdout
    table = [line.split() for line in done.stdout.splitlines()]
    start = table.index(["tokens", "sites", "kernel", "saved", "a", "step"])
    one, many, most = table[start + 1 : start + 4]
    kernel = ["over", "shared", "memory", "about"]
    assert one == ["1", "1", "one-shot", *kernel, saved_milliseconds(1), "ms"]
    assert many == ["512", "1", "two-shot", *kernel, saved_milliseconds(512), "ms"]
    assert most == ["4096", "1", "two-shot", "over", "shared", "memory", "unknown"]
    assert "one-shot over shared memory up to 32" in done.stdout
    assert "an estimate" in done.stdout
    assert "2 cores shared by 4 ranks" in done.stdout


def test_a_module_class_with_dynamic_tokens(model: str) -> None:
    (capture,) = explained(f"{model}:Block", "--tokens", "dynamic", *CPU)["captures"]
    (site,) = capture["sites"]
    assert site["site"]["fused"]
    rows, hidden = site["site"]["shape"]
    assert isinstance(rows, str)
    assert hidden == 4096
    assert [(part["first"], part["last"]) for part in site["ranges"]] == [(1, 32), (33, None)]


def test_a_target_fuses_few_tokens_and_leaves_many_as_they_are(
    model: str, tmp_path: Path
) -> None:
    text = explain(f"{model}:build", "--tokens", "1,512", "--save", str(tmp_path / "report"))
    assert "users_model.py:17" in (tmp_path / "report" / "index.html").read_text("utf-8")
    assert "all_reduce" in (tmp_path / "report" / "before.txt").read_text("utf-8")
    refused = explain(f"{model}:build", "--tokens", "1", "--save", str(tmp_path), status=2)
    assert str(tmp_path) in refused
    assert "1 of 1 sites fused, some numbers of tokens left as they are" in text
    assert "not_faster" in text
    ranges = "one-shot over symmetric memory up to 18; not fused from 19 on"
    assert ranges in " ".join(text.split())
    assert "not fused: our kernels are known to be faster up to 18 tokens only" in text
    assert "sm_90 was measured with 2 ranks, not with 8" in " ".join(text.split())


def test_a_site_that_is_not_fused_has_its_reason_and_remedy(model: str) -> None:
    text = explain(f"{model}:layer_norm", "--tokens", "4")
    assert "0 of 1 site fused" in text
    assert "reason    layer_norm" in text
    assert "remedy    The norm subtracts the mean" in text


def test_other_sites_with_other_numbers_of_tokens_are_shown_apart(model: str) -> None:
    captures = explained(f"{model}:by_size", "--tokens", "8,16", *CPU)["captures"]
    assert [(c["tokens"], c["all_reduces"]) for c in captures] == [([8], 0), ([16], 1)]


def test_a_model_that_sums_nothing_over_the_group_is_told_how_to_be_sharded(model: str) -> None:
    text = explain(f"{model}:unsharded", "--tokens", "4", status=1)
    assert "no all_reduce found" in text
    assert "parallelize_module" in text


@pytest.mark.parametrize(
    ("callable_name", "words"),
    [
        ("biuld", ["'biuld' is not a callable of", "Did you mean 'build'?"]),
        (
            "one_tensor",
            ["one_tensor returned a Tensor in second place", "(x,), with the comma"],
        ),
        ("nothing", ["nothing returned None: return (callable, args)"]),
        ("needs_hidden", ["needs hidden", "tokens, dtype, world_size"]),
        ("raises", ["raises(tokens=4) raised KeyError: 'weights'", "raise KeyError"]),
        ("second_group", ["group already", "is_initialized() is false"]),
        ("needs_values", ["--real-tensors"]),
        ("NoInputs", ["without a method example_inputs(tokens)"]),
        ("NUMBER", ["NUMBER is a int, not callable"]),
        ("wrong_shape", ["RuntimeError", "[4, 5] X [4, 4]"]),
    ],
)
def test_a_mistake_in_the_callable_is_named(
    model: str, callable_name: str, words: list[str]
) -> None:
    said = explain(f"{model}:{callable_name}", "--tokens", "4", status=2)
    assert [word for word in words if word not in said] == []
    assert not torch.distributed.is_initialized()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either FILE_OR_MODULE:CALLABLE or --hf CONFIG"),
        (["{model}"], "It has Block, build, layer_norm"),
        (["{folder}/users_modle.py:build"], "Did you mean 'users_model.py'?"),
        (["no_such_module_here:build"], "there is no module 'no_such_module_here'"),
        (["{model}:build", "--tokens", "0"], "give numbers above 0"),
        (["{model}:build", "--arch", "sm90"], "'sm_NN' (NVIDIA)"),
        (["{model}:build", "--dtype", "b16"], "Did you mean 'bf16'?"),
        (["{model}:build", "--kernel", "fast"], "choose one of auto, fx_fusion"),
        (["--hf", "{folder}/none.json"], "nothing is downloaded"),
        (["--hf", "{model}"], "is not JSON"),
    ],
)
def test_a_mistake_in_the_arguments_is_named(
    model: str, arguments: list[str], words: str
) -> None:
    given = [a.format(model=model, folder=Path(model).parent) for a in arguments]
    assert words in explain(*given, status=2)


def test_a_config_s_layers_are_drawn_out_to_what_capturing_all_of_them_gives(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = ("--hf", str(tmp_path), "--world-size", "2", "--tokens", "8")
    short, whole = explained(*given), explained(*given, "--every-layer")
    assert short["model"] == "LlamaForCausalLM, 6 layers"
    assert "4 of the 6 layers were captured" in short.pop("notes")[0]
    assert whole.pop("notes") == []
    assert short == whole
    assert short["captures"][0]["fused"] == short["captures"][0]["all_reduces"] == 13

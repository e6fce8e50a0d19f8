"""`fx-fusion snapshot`: a model's graph as a golden file, written or checked, for your own CI."""

from __future__ import annotations

import difflib
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fx_fusion.errors import FxFusionError, SettingError

if TYPE_CHECKING:  # it imports torch, which `--help` needs not
    from fx_fusion.capture import When
    from fx_fusion.cli.looking import Asked

_WHEN: Final = ("before", "after")
_HELP: Final = """Write or check a model's graph as a golden file, for your CI.

\b
    fx-fusion snapshot model.py:build --file golden.txt --update
    fx-fusion snapshot model.py:build --file golden.txt

The text depends neither on the machine nor on torch's own names. What CALLABLE may be is in
fx-fusion explain --help.

Exit status: 0 it is the same, or was written; 1 it differs, and the difference is printed; 2 there is
no such file yet, or the model could not be looked at."""


def register(app: typer.Typer) -> None:
    """Add the command `snapshot`."""
    app.command("snapshot", help=_HELP)(snapshot)


def snapshot(
    subject: Annotated[
        str, typer.Argument(metavar="FILE_OR_MODULE:CALLABLE", help="See explain --help.")
    ],
    file: Annotated[Path, typer.Option("--file", help="The golden file.")],
    update: Annotated[
        bool, typer.Option("--update", help="Write the file in place of checking it.")
    ] = False,
    when: Annotated[
        str, typer.Option(help="before or after: the graph the pass finds, or what it makes.")
    ] = "after",
    world_size: Annotated[int, typer.Option(min=2, help="Ranks of the group.")] = 8,
    tokens: Annotated[str, typer.Option(help="A number of tokens, or dynamic.")] = "64",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    merge_all_reduces: Annotated[
        bool, typer.Option("--merge-all-reduces", help="Turn AR(a) + AR(b) into AR(a + b).")
    ] = False,
    training: Annotated[
        bool, typer.Option("--training", help="Gradients are on: backward graphs too.")
    ] = False,
    real_tensors: Annotated[
        bool,
        typer.Option("--real-tensors", help="Make real tensors on the CPU, not meta ones."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead.")
    ] = False,
) -> None:
    """Write or check a golden file; see `_HELP`."""
    try:
        from fx_fusion.cli import looking

        if when not in _WHEN:
            raise SettingError(f"--when {when}: choose one of {', '.join(_WHEN)}.")
        counts = looking.parsed_tokens(tokens)
        if len(counts) != 1:
            raise SettingError(f"--tokens {tokens}: a snapshot is of one number, or dynamic.")
        if not update and not file.is_file():
            raise SettingError(f"there is no file {file} to check: --update writes it.")
        asked = looking.Asked(
            name=subject,
            world_size=world_size,
            tokens=counts,
            dtype=dtype,
            settings={"merge_all_reduces": merge_all_reduces},
            real=real_tensors,
            training=training,
        )
        text = _text(asked, "before" if when == "before" else "after")
        golden = file.read_text(encoding="utf-8") if file.is_file() else None
        if update and text != golden:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except (FxFusionError, OSError, UnicodeDecodeError) as error:
        typer.echo(f"fx-fusion snapshot: {error}", err=True)
        raise typer.Exit(2) from None
    difference = [] if golden is None else _difference(golden, text, file)
    if as_json:
        document: dict[str, Any] = {
            "file": str(file),
            "same": golden == text,
            "written": update and golden != text,
            "difference": difference,
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        _say(file, update, golden, text, difference)
    raise typer.Exit(0 if update or golden == text else 1)


def _text(asked: Asked, when: When) -> str:
    """The graphs' text with a newline at the end."""
    from fx_fusion.cli import looking, subject
    from fx_fusion.testing import graph_snapshot

    with subject.tensor_parallel(asked.world_size, subject.dtype_of(asked.dtype)):
        (tokens,) = asked.tokens
        call = looking.call_at(looking.maker(asked), tokens)
        # The marks of sizes that are dynamic stand on the tensors, so these stay positional.
        fn = functools.partial(call.fn, **call.kwargs) if call.kwargs else call.fn
        with looking.following(asked, tokens):
            dynamic = None if isinstance(tokens, str) else False
            text = graph_snapshot(fn, *call.args, when=when, dynamic=dynamic, **asked.settings)
    if not text:
        raise SettingError(
            f"{asked.name} made no graph: its callable has no tensor operations."
        )
    return f"{text}\n"


def _difference(golden: str, text: str, file: Path) -> list[str]:
    lines = difflib.unified_diff(
        golden.splitlines(), text.splitlines(), str(file), "the graph now", lineterm=""
    )
    return list(lines)


def _say(
    file: Path, update: bool, golden: str | None, text: str, difference: list[str]
) -> None:
    if golden == text:
        typer.echo(f"{file}: the same" + (", so nothing was written" if update else ""))
        return
    for line in difference:
        typer.echo(line)
    if update:
        what = "written" if golden is None else "written anew, with the difference above"
        typer.echo(f"{file}: {what}")
    else:
        typer.echo(f"{file}: differs; if that is meant, --update writes it anew")

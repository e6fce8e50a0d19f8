"""`fx-fusion explain`: what would be fused on a machine you don't have, without GPU or weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fx_fusion.errors import FxFusionError, SettingError

if TYPE_CHECKING:  # these import torch, which `--help` needs not
    from fx_fusion.cli.hf_subject import HfModel
    from fx_fusion.cli.looking import Asked
    from fx_fusion.cli.sites import Row, Saving, Seen, Tokens
    from fx_fusion.settings import FusionSettings

#: Columns of the text where it is piped.
_COLUMNS: Final = 100

_HELP: Final = """Say what fx_fusion would make of a model, on a laptop: no GPU, no weights, one process.

\b
    fx-fusion explain model.py:build --arch sm_90 --world-size 8 --tokens 1,64,2048
    fx-fusion explain --hf folder/config.json --world-size 8

For every all_reduce: your line, fused or not, the kernel by tokens, the reason and what to do; and an
estimate of the time saved a step where this target was measured.

\b
CALLABLE is one of
(1) a function that returns (callable, args) or (callable, args, kwargs):
    def build(tokens): return Block(), (torch.empty(tokens, 4096),)
(2) an nn.Module class made without arguments, with a method that returns forward's arguments:
    def example_inputs(self, tokens): return (torch.empty(tokens, 4096),)

Both may take any of tokens, dtype and world_size by name. They run in a process group of --world-size ranks
(rank 0, no other process), with the meta device and --dtype as torch's defaults.

Exit status: 0 done; 1 no all_reduce was found, or the view ends early; 2 it could not be run."""


def register(app: typer.Typer) -> None:
    """Add the command `explain`."""
    app.command("explain", help=_HELP)(explain)


def explain(
    subject: Annotated[
        str, typer.Argument(metavar="FILE_OR_MODULE:CALLABLE", help="See above.")
    ] = "",
    hf: Annotated[
        Path | None,
        typer.Option("--hf", help="A local transformers config.json, or a folder with one."),
    ] = None,
    world_size: Annotated[int, typer.Option(min=2, help="Ranks of the group.")] = 8,
    arch: Annotated[
        str, typer.Option(help="Plan for cpu, sm_90 (NVIDIA), gfx942 (AMD) ...")
    ] = "sm_90",
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens, 1,64,2048; or dynamic.")
    ] = "1,64,2048",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    kernel: Annotated[
        str, typer.Option(help="auto, fx_fusion, flashinfer, aiter or unfused.")
    ] = "auto",
    merge_all_reduces: Annotated[
        bool, typer.Option("--merge-all-reduces", help="Turn AR(a) + AR(b) into AR(a + b).")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only sums in rank order.")
    ] = False,
    training: Annotated[
        bool, typer.Option("--training", help="Gradients are on: look at backward graphs too.")
    ] = False,
    real_tensors: Annotated[
        bool,
        typer.Option("--real-tensors", help="Make real tensors on the CPU, not meta ones."),
    ] = False,
    every_layer: Annotated[
        bool,
        typer.Option(
            "--every-layer", help="With --hf: leave out no layer that repeats others."
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Also write a page with pictures, the graphs and repro.py here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead.")
    ] = False,
) -> None:
    """Say what fx_fusion would make of a model; see `_HELP`."""
    from fx_fusion.cli import looking
    from fx_fusion.report import FusionReport

    try:
        settings = _settings(arch, world_size, kernel, merge_all_reduces, deterministic)
        asked = looking.Asked(
            name=str(hf) if hf is not None else subject,
            world_size=world_size,
            tokens=looking.parsed_tokens(tokens),
            dtype=dtype,
            settings=settings,
            real=real_tensors,
            training=training,
        )
        if bool(subject) == (hf is not None):
            raise SettingError(
                "give either FILE_OR_MODULE:CALLABLE or --hf CONFIG, such as"
                " fx-fusion explain model.py:build; --help has the rest."
            )
        seen, model = looking.look(asked, hf, every_layer)
        if save is not None:
            FusionReport.merged([one.report for one in seen]).save(save)
        status = _show(asked, seen, model, as_json)
    except FxFusionError as error:
        typer.echo(f"fx-fusion explain: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _settings(
    arch: str, world_size: int, kernel: str, merge: bool, deterministic: bool
) -> dict[str, Any]:
    from fx_fusion.settings import FusionSettings, Target

    given: dict[str, Any] = {
        "target": Target(arch=arch, world_size=world_size),
        "kernel": kernel,
        "merge_all_reduces": merge,
        "deterministic": deterministic,
    }
    FusionSettings.from_dict(given)
    return given


def _show(asked: Asked, seen: list[Seen], model: HfModel | None, as_json: bool) -> int:
    from fx_fusion.cli import sites
    from fx_fusion.settings import FusionSettings

    settings = FusionSettings.from_dict(asked.settings)
    assert settings.target is not None
    rows = sites.rows_of(seen, settings)
    groups: list[tuple[list[Seen], list[Row]]] = [(seen, rows)] if rows is not None else []
    if rows is None:  # other sites with other numbers of tokens: one by one
        for one in seen:
            alone = sites.rows_of([one], settings)
            assert alone is not None
            groups.append(([one], alone))
    savings = {
        one.tokens: sites.saving(of_group, one.tokens, settings.target.arch)
        for some, of_group in groups
        for one in some
    }
    if as_json:
        typer.echo(json.dumps(_document(asked, settings, groups, savings, model), indent=2))
    else:
        _print(asked, settings, groups, savings, model)
    found = any(one.report.site_count for one in seen)
    whole = found and not any(one.report.incomplete for one in seen)
    return 0 if whole else 1


def _document(
    asked: Asked,
    settings: FusionSettings,
    groups: list[tuple[list[Seen], list[Row]]],
    savings: dict[Tokens, Saving],
    model: HfModel | None,
) -> dict[str, Any]:
    from fx_fusion.cli import sites

    assert settings.target is not None
    return {
        "subject": asked.name,
        "model": None if model is None else model.name,
        "target": {"arch": settings.target.arch, "world_size": asked.world_size},
        "dtype": asked.dtype,
        "notes": [] if model is None else _model_notes(model),
        "captures": [
            {
                "tokens": [one.tokens for one in some],
                "fused": some[-1].report.fused_count,
                "all_reduces": some[-1].report.site_count,
                "incomplete": some[-1].report.incomplete,
                "notes": list(some[-1].report.notes),
                "sites": sites.as_json(rows),
            }
            for some, rows in groups
        ],
        "estimates": [
            {"tokens": tokens, "saved_us": saving.microseconds, "basis": list(saving.basis)}
            for tokens, saving in savings.items()
        ],
    }


def _print(
    asked: Asked,
    settings: FusionSettings,
    groups: list[tuple[list[Seen], list[Row]]],
    savings: dict[Tokens, Saving],
    model: HfModel | None,
) -> None:
    from rich.console import Console

    from fx_fusion.cli import explain_text as text

    assert settings.target is not None
    console = Console(highlight=False)
    console.width = max(console.width, _COLUMNS) if not console.is_terminal else console.width

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    target = f"{settings.target.arch}, {asked.world_size} ranks"
    say(f"{asked.name if model is None else model.name}: planned for {target}, {asked.dtype}")
    for note in () if model is None else _model_notes(model):
        for line in text.wrapped("", note):
            say(line)
    for some, rows in groups:
        if len(groups) > 1:
            say("")
            say(f"with {text.token_label(some[0].tokens)}:")
        say(text.heading(some, rows))
        for line in text.site_lines(rows, some):
            say(line)
        chosen = {one.tokens: savings[one.tokens] for one in some}
        text.print_kernels(console, rows, chosen, f"kernels for {target}")
        closing = list(text.closing_lines(some[-1].report))
        if not rows and not some[-1].report.incomplete:
            closing += text.wrapped("", _NO_SITE.format(asked.world_size))
        for line in ("", *closing) if closing else ():
            say(line)


_NO_SITE: Final = (
    "The call sums nothing over the group of {0} ranks, so the model isn't tensor-parallel as it is"
    " made here. In the function, shard it first: torch.distributed.init_device_mesh('cpu', ({0},))"
    " and parallelize_module, or your own modules that call torch.distributed.all_reduce."
)


def _model_notes(model: HfModel) -> list[str]:
    found = model.repetition
    if found is None:
        return list(model.notes)
    each = "layers" if found.period == 1 else f"groups of {found.period} layers"
    return [
        f"{found.kept} of the {found.layers} layers were captured and the rest counted like them:"
        f" from layer {found.prefix} on all {each} have the same modules, shapes and settings, and those"
        " captured came out alike (--every-layer captures all)",
        *model.notes,
    ]

"""A transformers config as something to look at: its model, tensor-parallel, without weights."""

from __future__ import annotations

import copy
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fx_fusion.cli import layers
from fx_fusion.cli.subject import Call, SubjectError, user_code
from fx_fusion.errors import unknown_name


@dataclass(frozen=True)
class HfModel:
    """A tensor-parallel model on the meta device.

    Attributes:
        name: Its class and size, for people.
        model: The model, maybe with fewer layers.
        repetition: How its layers repeat, if it has fewer; else None.
        notes: What of the config was left out.
    """

    name: str
    model: Any
    repetition: layers.Repetition | None
    notes: tuple[str, ...] = ()

    def call(self, tokens: int) -> Call:
        """One forward of one sequence, without a cache."""
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.model.config.is_encoder_decoder:
            kwargs["decoder_input_ids"] = ids.clone()
        return Call(self.model, (), kwargs)


def load_model(
    path: Path, *, dtype: torch.dtype, world_size: int, every_layer: bool
) -> HfModel:
    """Make the model of a config file, in a process group of `world_size` ranks.

    Args:
        path: A config.json, or a folder with one. Nothing is downloaded.
        dtype: Of its parameters.
        world_size: Ranks of the group.
        every_layer: Don't leave out layers that repeat others.

    Raises:
        SubjectError: No such file, no config, or transformers can't make this model parallel.
    """
    file = _config_file(path)
    if importlib.util.find_spec("transformers") is None:
        raise SubjectError('--hf needs transformers: pip install "fx-fusion[hf]"')
    import transformers

    transformers.utils.logging.set_verbosity_error()
    with user_code(f"transformers, reading {file},"):
        config = transformers.AutoConfig.from_pretrained(str(file))
    notes = []
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
        notes.append("the config's quantization is left out; the reduced tensors are the same")
    for part in (config, config.get_text_config()):
        # transformers shards tied weights only while it loads them; untied, the sums are the same
        part.tie_word_embeddings = False
    whole, config = _made(config, file, dtype)
    name = f"{type(whole).__name__}, {getattr(config, 'num_hidden_layers', '?')} layers"
    found = None if every_layer else layers.repetition(whole, config)
    if found is not None:
        short_config = copy.deepcopy(config)
        layers.shorten(short_config, found)
        short, _ = _made(short_config, file, dtype)
        if layers.agrees(short, whole, config, found):
            whole = short
        else:
            found = None
    return HfModel(name, _parallel(whole, file, world_size), found, tuple(notes))


def _config_file(path: Path) -> Path:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        folder = file.parent
        near = sorted(p.name for p in folder.glob("*.json")) if folder.is_dir() else []
        if near and not path.is_dir():
            raise SubjectError(unknown_name(f"file in {folder}", file.name, near))
        raise SubjectError(
            f"--hf {path}: there is no file {file}. Give a config.json or a folder with one;"
            " nothing is downloaded."
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SubjectError(f"{file} is not JSON: {error}.") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise SubjectError(
            f'{file} is not a transformers config: it has no "model_type" ("llama", "qwen3").'
        )
    return file


def _made(config: Any, file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model without weights, and the config of its text part."""
    import transformers

    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    with torch.device("meta"), user_code(f"transformers, making the model of {file},"):
        try:
            model = auto.from_config(config, dtype=dtype)
        except ValueError:
            text = config.get_text_config()
            if text is config:
                raise
            model = auto.from_config(text, dtype=dtype)
    return model.eval(), model.config.get_text_config()


def _parallel(model: Any, file: Path, world_size: int) -> Any:
    """The model as `from_pretrained(distributed_config=...)` would make it, but for weights."""
    from transformers import DistributedConfig

    kind = type(model)
    with user_code(f"transformers, making the model of {file} tensor-parallel,"):
        chosen = DistributedConfig(tp_size=world_size, tp_plan="auto")
        chosen, _, mesh = kind.prepare_distribute_model(chosen)
        return kind.maybe_distribute_model(model, chosen, mesh)

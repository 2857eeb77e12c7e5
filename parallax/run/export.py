"""The weights of a run's last checkpoint as others load them: a folder of transformers, or plain safetensors files.

Tensors are read, made into what the files are to hold, and written one after the other, so no more than what is made
together, such as the experts of one layer, is in memory. What the files will hold is known from the checkpoint's
headers before anything is written.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from parallax.common.files import disk_free_bytes, making_folder
from parallax.common.units import format_bytes
from parallax.errors import CheckpointError, ConfigError, printable
from parallax.model.construction.construct import construct
from parallax.model.construction.weights import INDEX, SINGLE, FileLayout, OwnLayout
from parallax.model.factory.adapters import has_adapters, save_adapter
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.factory.registry import BuiltModelConfig, base_of, build_model
from parallax.model.files.conversions import (
    PretrainedLayout,
    class_of_transformers,
    is_pretrained,
)
from parallax.model.files.tensors import Read, Recipe, write_tensors
from parallax.model.pretrained import tied_names
from parallax.run.job import built_model
from parallax.run.prepare import PreparedRun
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints

SHARD_BYTES = 5 * 10**9
"""What one file holds at most, unless tensors that are made together are more."""

# Of a folder of transformers what is of its weights, its training or its page, not of its tokenizer or processor.
_LEFT_NAMES = ("config.json", "generation_config.json", "trainer_state.json", "adapter_config.json")
_WEIGHT_ENDS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx")
_LEFT_ENDS = (
    *_WEIGHT_ENDS,
    *(".gguf", ".npz", ".index.json", ".log", ".lock"),
    *(".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf"),
)
_TEMPLATES = "additional_chat_templates"
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json")
_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Exported:
    """What was written: where, of which step, how many bytes of weights, which ``files``, and ``remarks`` on what was
    not to be had."""

    directory: Path
    step: int
    weight_bytes: int
    files: tuple[str, ...]
    remarks: tuple[str, ...]


class ExportForm(Protocol):
    """A form in which others load weights."""

    name: str

    def layout(self, model: nn.Module) -> FileLayout:
        """What its files hold of ``model``. Raises :class:`ConfigError` where that has no such form."""
        ...

    def write_beside(self, model: nn.Module, source: Path | None, folder: Path) -> list[str]:
        """Write into ``folder`` what belongs to the weights of ``model``, which began with the folder ``source``; what
        is to be said of it."""
        ...


class SafetensorsForm:
    """The weights alone, under the model's own names: what ``model=custom model.weights=`` reads."""

    name = "safetensors"

    def layout(self, model: nn.Module) -> FileLayout:
        """See :class:`ExportForm`."""
        del model
        return OwnLayout()

    def write_beside(self, model: nn.Module, source: Path | None, folder: Path) -> list[str]:
        """See :class:`ExportForm`."""
        del model, source, folder
        return []


class HuggingFaceForm:
    """A folder that ``from_pretrained`` of transformers loads, with the tokenizer's files of the folder that the run
    began with."""

    name = "huggingface"

    def layout(self, model: nn.Module) -> FileLayout:
        """See :class:`ExportForm`."""
        if not is_pretrained(model):
            raise ConfigError(
                f"--to huggingface: the run's model is a {type(model).__name__}, which is no model of transformers; "
                "use --to safetensors"
            )
        _check_as_configured(model)
        return PretrainedLayout(model)

    def write_beside(self, model: Any, source: Path | None, folder: Path) -> list[str]:
        """See :class:`ExportForm`."""
        settings, dtype = model.config, model.dtype
        parts = [getattr(settings, key, None) for key in settings.sub_configs]
        for part in (settings, *(each for each in parts if getattr(each, "dtype", None))):
            part.dtype = dtype
        settings.architectures = [class_of_transformers(model).__name__]
        settings.save_pretrained(folder)
        generation = source / "generation_config.json" if source else None
        if generation is not None and generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
        elif model.can_generate():
            model.generation_config.save_pretrained(folder)
        if source is None:
            return ["the run began with no folder of transformers: there is no tokenizer to copy"]
        _carry(source, folder)
        if not any((folder / name).exists() for name in (*_TOKENIZER, *_PROCESSOR)):
            return [f"{source} has no tokenizer and no processor to copy"]
        return []


class PeftForm:
    """The adapters alone, as ``PeftModel.from_pretrained(base, folder)`` loads them."""

    name = "peft"

    def layout(self, model: nn.Module) -> FileLayout:
        """See :class:`ExportForm`."""
        if not has_adapters(model):
            raise ConfigError(
                f"--to peft: the run's {type(model).__name__} has no adapters; use --to huggingface or --to safetensors"
            )
        return OwnLayout()

    def write_beside(self, model: nn.Module, source: Path | None, folder: Path) -> list[str]:
        """See :class:`ExportForm`."""
        del model, source, folder
        return []


FORMS: dict[str, ExportForm] = {
    form.name: form for form in (HuggingFaceForm(), SafetensorsForm(), PeftForm())
}


def export(run: PreparedRun, form: ExportForm, out: Path | None) -> Exported:
    """Write the last checkpoint of ``run`` in ``form`` to the folder ``out``, by default one of the run's directory
    with the step's name. All of it is there afterwards, or nothing."""
    checkpoint = _last(run)
    out = out or run.directory / form.name / checkpoint.name
    _check_free(out)
    config = built_model(run.config)
    model = construct(partial(build_model, config), run.config.seed).model
    adapting = base_of(config, run.config.seed) != ""
    if adapting and not isinstance(form, PeftForm):
        raise ConfigError(
            f"--to {form.name}: the run trains adapters, and its checkpoints do not hold their base; use --to peft"
        )
    layout = form.layout(model)
    reader = CheckpointReader(checkpoint)
    reader.check_whole()
    if adapting:
        return _export_adapters(model, reader, out, base=getattr(config, "weights", ""))
    tensors = _tensors_of(model, reader)
    sources = {layout.kept_name(names): names[0] for names in _names(model)}
    held = {name: tensors[source] for name, source in sources.items()}
    shards = _shards(layout.saved(held), held)
    size = sum(shard.size for shard in shards)
    _check_room(out, size)
    try:
        with making_folder(out) as folder:
            _write(folder, shards, lambda name: reader.read(f"model/{sources[name]}"))
            model.to(_usual_dtype(held.values()))
            remarks = form.write_beside(model, _beginning(config), folder)
            files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or printable(str(error))
        raise CheckpointError(
            f"--out {printable(str(out))}: cannot write {format_bytes(size)} there: {reason}, "
            f"{format_bytes(disk_free_bytes(out))} free; nothing is left of it"
        ) from error
    return Exported(out, reader.step, size, tuple(files), tuple(remarks))


def _export_adapters(
    model: nn.Module, reader: CheckpointReader, out: Path, *, base: str
) -> Exported:
    tensors = {name: reader.read(f"model/{name}") for name in reader.model_tensors()}
    with making_folder(out) as folder:
        left = save_adapter(model, tensors, folder, base=base)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    size = sum(tensor.nbytes for name, tensor in tensors.items() if name not in left)
    remarks = (f"files of peft have no place for {', '.join(left)}",) if left else ()
    return Exported(out, reader.step, size, tuple(files), remarks)


def _check_as_configured(model: Any) -> None:
    """A model that a factory has changed, by adapters or another head, is not what its configuration says: others would
    load something else."""
    kind = class_of_transformers(model)
    due = construct(lambda: kind(copy.deepcopy(model.config)), seed=1).model
    shapes, wanted = (
        {name: tensor.shape for name, tensor in each.state_dict(keep_vars=True).items()}
        for each in (model, due)
    )
    ties, wanted_ties = (sorted(map(sorted, _names(each))) for each in (model, due))
    changed = [name for name in {**shapes, **wanted} if shapes.get(name) != wanted.get(name)]
    changed += [min(names) for names in ties if names not in wanted_ties and not changed]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"--to huggingface: the run's model is no {kind.__name__} of its configuration: {', '.join(changed[:3])}"
            f"{more} differ; use --to safetensors"
        )


def _last(run: PreparedRun) -> Path:
    found = list_checkpoints(run.config.checkpoint.folder(run.directory, run.config.name))
    if not found:
        raise ConfigError(
            f"{printable(str(run.directory))} has no checkpoint yet: a run saves every trainer.checkpoint_every "
            "steps, at its end, and where SIGTERM or Ctrl-C ends it"
        )
    return found[-1]


def _check_free(out: Path) -> None:
    """No file is there and nothing in the folder, so that what an export makes is of one run alone."""
    taken = "it is no folder" if out.exists() and not out.is_dir() else ""
    if out.is_dir() and any(out.iterdir()):
        taken = "it is not empty"
    if taken:
        raise ConfigError(
            f"--out {printable(str(out))}: {taken}; name another folder, or move that away"
        )


def _check_room(out: Path, size: int) -> None:
    free = disk_free_bytes(out)
    if size > free:
        raise CheckpointError(
            f"--out {printable(str(out))}: the weights are {format_bytes(size)}, and {format_bytes(free)} are free "
            "there; make room, or name a folder on another disk"
        )


def _names(model: nn.Module) -> list[list[str]]:
    """All names of each tensor of ``model`` that is saved, the checkpoint's first."""
    aliases = tied_names(model)
    others = {other for names in aliases.values() for other in names}
    known = model.state_dict(keep_vars=True)
    return [[name, *aliases.get(name, ())] for name in known if name not in others]


def _tensors_of(model: nn.Module, reader: CheckpointReader) -> dict[str, Tensor]:
    """What the checkpoint has of ``model``, without values. Raises :class:`CheckpointError` where it is of another."""
    known, found = model.state_dict(keep_vars=True), reader.model_tensors()
    due = {names[0]: known[names[0]].shape for names in _names(model)}
    wrong = [
        name for name in {**due, **found} if name not in found or due.get(name) != found[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{reader.directory} is not of the model that the run's settings say now: {', '.join(wrong[:3])}{more}; "
            "restore what they name (model.pretrained, model.target)"
        )
    return found


@dataclass
class _Shard:
    """One file: what it holds, without values, how that is made, and its bytes."""

    held: dict[str, Tensor] = field(default_factory=dict)
    recipes: list[Recipe] = field(default_factory=list)
    size: int = 0


def _shards(recipes: Sequence[Recipe], held: Mapping[str, Tensor]) -> list[_Shard]:
    """What is made, in files of :data:`SHARD_BYTES`; large numbers before small ones, so that all lie at multiples of
    their size."""
    made = [(recipe, recipe.make(held.__getitem__)) for recipe in recipes]
    made.sort(key=lambda pair: -max(tensor.itemsize for tensor in pair[1].values()))
    shards = [_Shard()]
    for recipe, tensors in made:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if shards[-1].held and shards[-1].size + size > SHARD_BYTES:
            shards.append(_Shard())
        shards[-1].held.update(tensors)
        shards[-1].recipes.append(recipe)
        shards[-1].size += size
    return shards


def _write(folder: Path, shards: Sequence[_Shard], read: Read) -> None:
    count = len(shards)
    stem = SINGLE.removesuffix(".safetensors")
    names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for shard, name in zip(shards, names if count > 1 else [SINGLE], strict=True):
        write_tensors(folder / name, shard.held, shard.recipes, read)
    if count > 1:
        total = sum(shard.size for shard in shards)
        places = {held: name for shard, name in zip(shards, names) for held in shard.held}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _usual_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The number format of most that floats."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _beginning(config: BuiltModelConfig) -> Path | None:
    """The folder of transformers that a run began with."""
    if isinstance(config, HuggingFaceConfig) and config.pretrained:
        return Path(config.pretrained).expanduser()
    return None


def _carry(source: Path, folder: Path) -> None:
    """Copy what a folder of transformers has beside its weights: tokenizer, processor, chat templates."""
    for path in sorted(source.iterdir()):
        left = path.name.startswith(".") or path.name in _LEFT_NAMES
        if path.is_file() and not left and not path.name.lower().endswith(_LEFT_ENDS):
            shutil.copyfile(path, folder / path.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)

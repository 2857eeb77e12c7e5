"""Export a folder of transformers: weights, configuration, tokenizer and processor."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.errors import ConfigError
from parallax.model.construction.deferred import deferred_init
from parallax.model.factory.adapters import has_adapters
from parallax.model.files.conversions import (
    PretrainedLayout,
    class_of_transformers,
    is_pretrained,
)
from parallax.run.export.adapters import PeftForm
from parallax.run.export.form import Contents, Trained, all_names
from parallax.run.export.shards import Shards

# Files of a transformers folder that are not copied: weights, training state and model card, not tokenizer or
# processor.
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


class HuggingFaceForm:
    """A folder for ``from_pretrained``. The tokenizer's files are copied from the folder that the run started from.
    Adapters that are not merged are written in peft's format."""

    name, takes_adapters, takes_merged = "huggingface", True, True

    def contents(self, trained: Trained) -> Contents:
        """Return the files to write for ``trained``, as :class:`Contents`."""
        model: Any = trained.model
        if not is_pretrained(model):
            raise ConfigError(
                f"--to huggingface: the run's model is a {type(model).__name__}, which is no model of transformers; "
                f"use --to {'peft' if has_adapters(model) else 'safetensors'}"
            )
        if has_adapters(model):
            return _adapters(trained)
        _check_as_configured(model)
        shards = Shards(trained, PretrainedLayout(model))

        def write(folder: Path) -> list[str]:
            shards.write(folder)
            model.to(_usual_dtype(shards.held.values()))
            return _write_beside(model, trained.beginning, folder)

        return Contents(shards.size, write)


def _adapters(trained: Trained) -> Contents:
    """Return the files to write for the adapters, in peft's format, with the tokenizer of their base model if the run
    started from a folder of transformers."""
    adapters = PeftForm().contents(trained)

    def write(folder: Path) -> list[str]:
        remarks = adapters.write(folder)
        if trained.beginning is not None:
            _carry(trained.beginning, folder)
        return [
            *remarks,
            "the folder holds adapters in peft's form: --merge adds them to the weights of the base",
        ]

    return Contents(adapters.size, write)


def _write_beside(model: Any, source: Path | None, folder: Path) -> list[str]:
    """Write the files other than the weights into ``folder``: the configuration of ``model``, and the tokenizer and
    processor in ``source``, the folder that the run started from (None if there is none). Return messages for the user
    about missing files."""
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


def _check_as_configured(model: Any) -> None:
    """Raise :class:`ConfigError` if a factory changed the model, for example by adapters or another head. Transformers
    would otherwise build another model from the exported configuration."""
    kind = class_of_transformers(model)
    due = deferred_init(lambda: kind(copy.deepcopy(model.config)), seed=1).model
    shapes, wanted = (
        {name: tensor.shape for name, tensor in each.state_dict(keep_vars=True).items()}
        for each in (model, due)
    )
    ties, wanted_ties = (sorted(map(sorted, all_names(each))) for each in (model, due))
    changed = [name for name in {**shapes, **wanted} if shapes.get(name) != wanted.get(name)]
    changed += [min(names) for names in ties if names not in wanted_ties and not changed]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"--to huggingface: the run's model is no {kind.__name__} of its configuration: {', '.join(changed[:3])}"
            f"{more} differ; use --to safetensors"
        )


def _usual_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the floating-point dtype of most of the tensors."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _carry(source: Path, folder: Path) -> None:
    """Copy tokenizer, processor and chat templates from the transformers folder ``source``."""
    for path in sorted(source.iterdir()):
        left = path.name.startswith(".") or path.name in _LEFT_NAMES
        if path.is_file() and not left and not path.name.lower().endswith(_LEFT_ENDS):
            shutil.copyfile(path, folder / path.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)

"""A model of transformers from its configuration, built without weights or loaded from a folder, stage by stage."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from parallax.common.documents import SMALL_BYTES, read_text
from parallax.errors import (
    ConfigError,
    check_choice,
    check_positive,
    check_switch,
    nearest,
    printable,
)

ATTENTION = ("auto", "sdpa", "eager")
# What a configuration of transformers has, and something else of a run says.
_SAID_ELSEWHERE = {
    "dtype": "the number format is precision's: precision=fp32, bf16, mixed_bf16 and others",
    "torch_dtype": "the number format is precision's: precision=fp32, bf16, mixed_bf16 and others",
    "attn_implementation": "it is model.attention=auto, sdpa or eager",
    "gradient_checkpointing": "the plan says what is recomputed: plan.activations=recompute, or auto, block by block",
}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A model of transformers.

    ``architecture``: a class by its name (``LlamaForCausalLM``), or a task (``AutoModelForSequenceClassification``) for
    which ``config.model_type`` or the folder names the class. ``config``: settings that differ from the class's default
    configuration, in nested ones too (``model.config.hidden_size=256``). ``pretrained``: a folder with ``config.json``
    and safetensors, as ``save_pretrained`` writes it; class, sizes and weights come from there. Weights that it lacks,
    such as those of a new head, the model's constructor makes. Nothing is downloaded. ``attention``: the implementation
    by transformers' name; auto is transformers' choice for the class. ``sequence``: tokens in a row of text.
    ``adapter``: adapters that are trained in place of the model, in peft's own words
    (:mod:`parallax.model.factory.adapters`). ``verify``: whether the chain is compared with the model's own forward
    before the first step: true, false, or auto, which does so once for each model
    (:func:`~parallax.model.verification.verify.verify`).
    """

    name: str = "huggingface"
    architecture: str = "auto"
    config: dict[str, Any] = field(default_factory=dict)
    pretrained: str = ""
    attention: str = "auto"
    sequence: int = 256
    adapter: dict[str, Any] = field(default_factory=dict)
    verify: bool | str = "auto"

    def __post_init__(self) -> None:
        check_switch("model.verify", self.verify)
        check_choice("model.attention", self.attention, ATTENTION)
        check_positive("model.sequence", self.sequence)
        for path, key in _keys(self.config):
            if key in _SAID_ELSEWHERE:
                raise ConfigError(f"model.config.{path}: {_SAID_ELSEWHERE[key]}; leave it out here")

    def build(self) -> nn.Module:
        """The model, on torch's default device, with random weights."""
        settings = copy.deepcopy(self._settings)  # models write into theirs
        try:
            model: nn.Module = self._class(settings)
        except (ValueError, ImportError) as error:
            if self.attention == "auto" or "attention" not in str(error):
                raise
            raise ConfigError(
                f"model.attention={self.attention}: {self._class.__name__} has none such; use model.attention=auto"
            ) from error
        return model

    @property
    def weights(self) -> str:
        """Where its weights are; empty: they are random."""
        return self.pretrained

    @property
    def vocabulary(self) -> int:
        """How many different tokens it knows; none where it is a model of images."""
        return int(getattr(self._settings.get_text_config(), "vocab_size", None) or 0)

    @cached_property
    def _class(self) -> Any:
        transformers = _transformers()
        name = self._architecture_of_folder() if self.architecture == "auto" else self.architecture
        found: Any = getattr(transformers, name, None)
        if getattr(found, "_model_mapping", None) is not None:
            return self._class_for(name, found)
        fits = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if not fits:
            raise ConfigError(
                f"model.architecture={printable(name)}: transformers {transformers.__version__} has no such model; "
                "accepted are its classes, such as LlamaForCausalLM, and tasks, such as AutoModelForCausalLM"
            )
        self._check_type(found.config_class)
        return found

    def _class_for(self, task: str, auto: Any) -> Any:
        """The class of a task, such as AutoModelForCausalLM, for the model's type."""
        transformers = _transformers()
        kind = str(self.config.get("model_type") or self._saved.get("model_type") or "")
        if not kind:
            raise ConfigError(
                f"model.architecture={task}: it is a task; say for which model with model.config.model_type, such as "
                "llama, or give model.pretrained"
            )
        if kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(
                f"model.config.model_type={printable(kind)}: transformers {transformers.__version__} has no such type"
                f"{nearest(kind, transformers.CONFIG_MAPPING.keys())}"
            )
        known = transformers.CONFIG_MAPPING[kind]
        found = auto._model_mapping.get(known, None)
        if found is None:
            tasks = ", ".join(_tasks_of(known)) or "none"
            raise ConfigError(
                f"model.architecture={task}: there is none for model_type={kind}; accepted are {tasks}"
            )
        classes = list(found) if isinstance(found, list | tuple) else [found]
        saved = self._saved.get("architectures") or []
        return next((each for each in classes if each.__name__ in saved), classes[0])

    def _check_type(self, kind: Any) -> None:
        """A type that was named beside a class is the class's own."""
        typed = self.config.get("model_type", kind.model_type)
        if typed != kind.model_type:
            raise ConfigError(
                f"model.config.model_type={printable(str(typed))}: model.architecture={self.architecture} is of type "
                f"{kind.model_type}; leave one of them out"
            )

    @cached_property
    def _settings(self) -> Any:
        """The configuration of transformers that this one says."""
        kind = self._class.config_class
        asked = {key: value for key, value in self.config.items() if key != "model_type"}
        if asked:
            _check_known("model.config", asked, kind())
        asked = copy.deepcopy(asked)  # transformers writes into nested ones
        try:
            if self.pretrained:
                settings = kind.from_pretrained(str(self._folder), local_files_only=True, **asked)
            else:
                settings = kind(**asked)
        except Exception as error:  # whatever its checks of a setting raise
            raise ConfigError(
                f"model.config={self.config}: {' '.join(str(error).split()):.300}"
            ) from error
        if self.attention != "auto":
            settings._attn_implementation = self.attention  # of nested ones, too
        for key, value in asked.items():
            part: Any = getattr(settings, key, None)
            if isinstance(value, Mapping) and hasattr(part, "to_diff_dict"):
                kind = type(part)
                _check_known(f"model.config.{key}", value, kind())
        self._check_plain(settings)
        return settings

    def _check_plain(self, settings: Any) -> None:
        quantized = getattr(settings, "quantization_config", None)
        if quantized is not None:
            as_dict = quantized if isinstance(quantized, Mapping) else vars(quantized)
            method = printable(str(as_dict.get("quant_method")))
            raise ConfigError(
                f"model.pretrained={self.pretrained}: its weights are quantized ({method}), and those cannot be "
                "trained; give the folder of the model before that"
            )

    @property
    def _folder(self) -> Path:
        return Path(self.pretrained).expanduser()

    @cached_property
    def _saved(self) -> dict[str, Any]:
        """What the folder's ``config.json`` says; nothing where there is no folder."""
        if not self.pretrained:
            return {}
        path = self._folder / "config.json"
        try:
            return dict(json.loads(read_text(path, SMALL_BYTES)))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"model.pretrained={self.pretrained}: {path} does not name an architecture ({error}); give a folder "
                "that save_pretrained of transformers wrote"
            ) from error

    def _architecture_of_folder(self) -> str:
        if not self.pretrained:
            raise ConfigError(
                "model.architecture=auto: name a class such as LlamaForCausalLM, or a task such as "
                "AutoModelForCausalLM with model.config.model_type, or give model.pretrained"
            )
        named = self._saved.get("architectures") or []
        if not isinstance(named, list) or not named:
            raise ConfigError(
                f"model.pretrained={self.pretrained}: {self._folder / 'config.json'} does not name an architecture; "
                "name a class or a task with model.architecture"
            )
        return str(named[0])


def _check_known(path: str, asked: Mapping[str, Any], known: Any) -> None:
    """Every key is one of the configuration ``known``, a default one."""
    for key in asked:
        if key != "model_type" and not hasattr(known, str(key)):
            raise ConfigError(
                f"{path}.{key}: {type(known).__name__} has no such setting{nearest(str(key), known.to_dict())}"
            )


def _keys(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a nest, with its path."""
    for key, value in tree.items():
        yield f"{path}{key}", str(key)
        if isinstance(value, Mapping):
            yield from _keys(value, f"{path}{key}.")


def _tasks_of(kind: Any) -> list[str]:
    """The names of the tasks that transformers has a class for, with a configuration of that class."""
    transformers = _transformers()
    names = [name for name in dir(transformers) if name.startswith("AutoModel")]
    mappings = {
        name: getattr(getattr(transformers, name), "_model_mapping", None) for name in names
    }
    return [name for name, mapping in mappings.items() if mapping is not None and kind in mapping]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "model=huggingface: it needs transformers; install it with pip install 'parallax-train[hf]'"
        ) from error
    return transformers

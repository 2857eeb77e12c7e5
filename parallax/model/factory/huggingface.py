"""Build a transformers model from its configuration. Weights are random, or each stage reads its own from a folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
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
from parallax.model.factory.adapters import AdaptableModelConfig

ATTENTION = ("auto", "sdpa", "eager")
_UNDECLARED = ("decoder_start_token_id",)
"""Settings that encoder-decoder models read although some of their configuration classes do not declare them."""
# Settings of transformers that other parts of a run's configuration replace.
_SET_ELSEWHERE = {
    "dtype": "set the number format with precision=fp32, bf16, mixed_bf16 or others",
    "torch_dtype": "set the number format with precision=fp32, bf16, mixed_bf16 or others",
    "attn_implementation": "use model.attention=auto, sdpa or eager",
    "gradient_checkpointing": "use plan.activations=recompute, or auto to decide per block",
}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig(AdaptableModelConfig):
    """A model of transformers.

    ``architecture``: the name of a class (``LlamaForCausalLM``), or of a task (``AutoModelForSequenceClassification``).
        For a task, the class follows from ``config.model_type`` or the folder.
    ``config``: settings that differ from the class's default configuration, also nested ones
        (``model.config.hidden_size=256``).
    ``pretrained``: a folder with ``config.json`` and safetensors files, as ``save_pretrained`` writes. Class, sizes and
        weights come from this folder. Weights that it lacks, such as those of a new head, are created by the model's
        constructor. Nothing is downloaded.
    ``attention``: the attention implementation, by transformers' name; auto is transformers' choice.
    ``sequence``: tokens per row of text.
    ``adapter``: adapters to train instead of the model, in peft's own keys (:mod:`parallax.model.factory.adapters`).
    ``verify``: whether to compare the chain with the model's own forward before the first step: true, false, or auto
        (once per model, :func:`~parallax.model.verification.verify.verify`).
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
            if key in _SET_ELSEWHERE:
                raise ConfigError(f"model.config.{path}: {_SET_ELSEWHERE[key]}; leave it out here")

    def create(self) -> nn.Module:
        """Return the model, on torch's default device, with random weights."""
        settings = copy.deepcopy(self._settings)  # models modify their settings
        try:
            model: nn.Module = self._class(settings)
        except (ValueError, ImportError) as error:
            if self.attention == "auto" or "attention" not in str(error):
                raise
            raise ConfigError(
                f"model.attention={self.attention}: {self._class.__name__} lacks it; use model.attention=auto"
            ) from error
        return model

    @property
    def takes_labels(self) -> bool:
        return True

    @property
    def weights(self) -> str:
        return self.pretrained

    @property
    def libraries(self) -> Sequence[str]:
        return ("transformers.modeling_utils",)

    @property
    def built_of(self) -> str:
        return self.architecture

    @property
    def partial_weights(self) -> bool:
        return True

    @property
    def exported_from(self) -> str:
        return self.pretrained

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary; 0 for a model of images."""
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
        """Return the model class that transformers has for ``task`` and the configured type of model.

        ``task``: such as AutoModelForCausalLM. ``auto``: transformers' object for the task.
        """
        transformers = _transformers()
        kind = str(self.config.get("model_type") or self._saved.get("model_type") or "")
        if not kind:
            raise ConfigError(
                f"model.architecture={task}: it is a task; name the model with model.config.model_type, such as "
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
                f"model.architecture={task}: model_type={kind} does not support it; accepted are {tasks}"
            )
        classes = list(found) if isinstance(found, list | tuple) else [found]
        saved = self._saved.get("architectures") or []
        return next((each for each in classes if each.__name__ in saved), classes[0])

    def _check_type(self, kind: Any) -> None:
        """Raise :class:`ConfigError` if ``config.model_type`` is set to another type than that of ``kind``.

        ``kind``: the configuration class of the configured model class.
        """
        typed = self.config.get("model_type", kind.model_type)
        if typed != kind.model_type:
            raise ConfigError(
                f"model.config.model_type={printable(str(typed))}: model.architecture={self.architecture} is of type "
                f"{kind.model_type}; leave one of them out"
            )

    @cached_property
    def _settings(self) -> Any:
        """The transformers configuration object of this model."""
        kind = self._class.config_class
        settings_given = {key: value for key, value in self.config.items() if key != "model_type"}
        if settings_given:
            _check_known("model.config", settings_given, kind())
        settings_given = copy.deepcopy(settings_given)  # transformers modifies nested ones
        try:
            if self.pretrained:
                settings = kind.from_pretrained(
                    str(self._folder), local_files_only=True, **settings_given
                )
            else:
                settings = kind(**settings_given)
        except Exception as error:  # checks of a setting may raise anything
            raise ConfigError(
                f"model.config={self.config}: {' '.join(str(error).split()):.300}"
            ) from error
        if self.attention != "auto":
            settings._attn_implementation = self.attention  # also sets nested ones
        for key, value in settings_given.items():
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
                f"model.pretrained={self.pretrained}: its weights are quantized ({method}) and cannot be "
                "trained; give the folder of the unquantized model"
            )

    @property
    def _folder(self) -> Path:
        return Path(self.pretrained).expanduser()

    @cached_property
    def _saved(self) -> dict[str, Any]:
        """The content of ``config.json`` in the folder ``pretrained``; empty if no folder is configured."""
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


def _check_known(path: str, settings_given: Mapping[str, Any], known: Any) -> None:
    """Raise :class:`ConfigError` for a key of ``settings_given`` that ``known``, a default configuration, lacks."""
    undeclared = _UNDECLARED if getattr(known, "is_encoder_decoder", False) else ()
    for key in settings_given:
        if key not in ("model_type", *undeclared) and not hasattr(known, str(key)):
            raise ConfigError(
                f"{path}.{key}: {type(known).__name__} has no such setting{nearest(str(key), known.to_dict())}"
            )


def _keys(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, key) for every key of the nested mapping ``tree``. ``path``: the dotted path of ``tree``
    itself."""
    for key, value in tree.items():
        yield f"{path}{key}", str(key)
        if isinstance(value, Mapping):
            yield from _keys(value, f"{path}{key}.")


def _tasks_of(kind: Any) -> list[str]:
    """Return the names of the transformers tasks that support models with the configuration class ``kind``."""
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

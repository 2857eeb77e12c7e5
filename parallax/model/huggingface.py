"""A model of transformers from its configuration, built without weights or loaded from a folder, stage by stage; and
what its files call its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from parallax.errors import ConfigError, check_choice, check_positive, check_switch, nearest

ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A class of transformers by its name (``architecture=LlamaForCausalLM``), with what differs from its default
    configuration in ``config``.

    ``pretrained``: a folder with ``config.json`` and safetensors, as ``save_pretrained`` writes it; class, sizes and
    weights come from there. Nothing is downloaded. ``sequence``: tokens in a row of text.
    ``verify``: whether the chain is compared with the
    model's own forward before the first step (:func:`~parallax.model.verification.verify.verify`).
    """

    name: str = "huggingface"
    architecture: str = "auto"
    config: dict[str, Any] = field(default_factory=dict)
    pretrained: str = ""
    attention: str = "sdpa"
    sequence: int = 256
    verify: bool | str = "auto"

    def __post_init__(self) -> None:
        check_switch("model.verify", self.verify)
        check_choice("model.attention", self.attention, ATTENTION)
        check_positive("model.sequence", self.sequence)

    def build(self) -> nn.Module:
        """The model, on torch's default device, with random weights."""
        model: nn.Module = self._class(self._class.config_class.from_dict(self._settings.to_dict()))
        return model

    @property
    def weights(self) -> str:
        """Where its weights are; empty: they are random."""
        return self.pretrained

    @property
    def vocabulary(self) -> int:
        """How many different tokens it knows; none where it is a model of images."""
        return int(getattr(self._settings, "vocab_size", 0))

    @cached_property
    def _class(self) -> Any:
        transformers = _transformers()
        name = self._saved_architecture() if self.architecture == "auto" else self.architecture
        found = getattr(transformers, name, None)
        if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
            raise ConfigError(
                f"model.architecture={name}: transformers {transformers.__version__} has no such model; accepted are "
                "its classes, such as LlamaForCausalLM"
            )
        return found

    @cached_property
    def _settings(self) -> Any:
        """The configuration of transformers that this one says."""
        kind = self._class.config_class
        known = kind()
        for key in self.config:
            if not hasattr(known, key):
                raise ConfigError(
                    f"model.config.{key}: {kind.__name__} has no such setting{nearest(key, known.to_dict())}"
                )
        overrides = {**self.config, "attn_implementation": self.attention}
        try:
            if self.pretrained:
                return kind.from_pretrained(self.pretrained, local_files_only=True, **overrides)
            return kind(**overrides)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(
                f"model.config={self.config}: {str(error).splitlines()[0]}"
            ) from error

    def _saved_architecture(self) -> str:
        if not self.pretrained:
            raise ConfigError(
                "model.architecture=auto: name a class such as LlamaForCausalLM, or give model.pretrained"
            )
        path = Path(self.pretrained).expanduser() / "config.json"
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["architectures"][0])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"model.pretrained={self.pretrained}: {path} does not name an architecture ({error}); give a folder "
                "that save_pretrained of transformers wrote, or model.architecture"
            ) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "model=huggingface: it needs transformers; install it with pip install 'parallax-train[hf]'"
        ) from error
    return transformers


def file_names(model: nn.Module) -> Callable[[str], str]:
    """What ``model`` calls a tensor that its files may call otherwise."""
    return FileNames(model) if hasattr(model, "base_model_prefix") else str


class FileNames:
    """What ``model`` calls the tensors of its files: names changed with transformers' releases, and files of the inner
    model alone lack its prefix. Conversions that compute are not made."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, name: str) -> str:
        """What the model calls the tensor of a file that is called ``name`` there."""
        for step in self._renamings:
            name, _ = step.rename_source_key(name)
        prefixed = f"{self._model.base_model_prefix}.{name}"
        return prefixed if name not in self._known and prefixed in self._known else name

    @cached_property
    def _known(self) -> set[str]:
        return set(self._model.state_dict())

    @cached_property
    def _renamings(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        return [
            step
            for step in get_model_conversion_mapping(self._model)
            if isinstance(step, WeightRenaming)
        ]

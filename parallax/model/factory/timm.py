"""Build a timm model by its name. Weights are random, or each stage reads its own from a file or folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallax.common.documents import SMALL_BYTES, read_text
from parallax.common.targets import call_target
from parallax.errors import ConfigError, check_switch, nearest
from parallax.model.factory.adapters import AdaptableModelConfig
from parallax.model.pretrained import log_once, mismatched_shapes, read_weights

AUTO = "auto"
_TWICE = re.compile(r"got multiple values for keyword argument '(\w+)'")


@dataclass(frozen=True, kw_only=True)
class TimmConfig(AdaptableModelConfig):
    """A model of timm.

    ``architecture``: a name of ``timm.list_models()`` (``vit_tiny_patch16_224``).
    ``kwargs``: arguments of ``timm.create_model``.
    ``pretrained``: a safetensors file, or a folder with ``model.safetensors`` and optionally ``config.json``, as timm's
        ``save_for_hf`` writes. Weights come from it. Architecture and arguments come from it, too, if you give none. If
        the model has another number of classes, its head keeps the constructor's values. Nothing is downloaded.
    ``adapter``: adapters to train instead of the model, in peft's own keys (:mod:`parallax.model.factory.adapters`).
    ``verify``: whether to compare the chain with the model's own forward before the first step: true, false, or auto
        (once per model, :func:`~parallax.model.verification.verify.verify`).
    """

    name: str = "timm"
    architecture: str = AUTO
    kwargs: dict[str, Any] = field(default_factory=dict)
    pretrained: str = ""
    adapter: dict[str, Any] = field(default_factory=dict)
    verify: bool | str = AUTO

    def __post_init__(self) -> None:
        check_switch("model.verify", self.verify)
        for key in ("pretrained", "checkpoint_path"):
            if key in self.kwargs:
                raise ConfigError(
                    f"model.kwargs.{key}: each stage reads its own weights; name a file or folder in model.pretrained"
                )

    def create(self) -> nn.Module:
        """Return the model, on torch's default device, with the weights of ``pretrained`` or random weights."""
        arguments = {"model_name": self._architecture, **self._saved_arguments, **self.kwargs}
        try:
            model: nn.Module = call_target("model", "timm:create_model", arguments)
        except TypeError as error:
            found = _TWICE.search(str(error))
            if found is None or found[1] not in self.kwargs:
                raise
            raise ConfigError(
                f"model.kwargs.{found[1]}: {self._architecture} of timm sets it itself; remove it, or name another "
                "architecture"
            ) from error
        if self.pretrained:
            self._read(model)
        return model

    def _read(self, model: nn.Module) -> None:
        """Load all weights into ``model``, except those of a head with another number of classes."""
        path = Path(self.pretrained).expanduser()
        heads = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
        heads = (heads,) if isinstance(heads, str) else heads
        known = [f"{head}.{kind}" for head in heads for kind in ("weight", "bias")]
        new = mismatched_shapes(model, path, known)
        if new:
            log_once(
                f"weights {path}: {', '.join(new)} are for other classes: the constructor initializes them"
            )
        read_weights(model, path, without=new)

    @property
    def weights(self) -> str:
        return self.pretrained

    @property
    def libraries(self) -> Sequence[str]:
        return ("timm",)

    @property
    def built_of(self) -> str:
        return self.architecture

    @property
    def reads_weights(self) -> bool:
        return True

    @property
    def vocabulary(self) -> int:
        return 0

    @cached_property
    def _architecture(self) -> str:
        name = self.architecture
        if name == AUTO:
            name = str(self._saved.get("architecture", ""))
        if not name:
            raise ConfigError(
                "model.architecture=auto: name one of timm.list_models(), such as vit_tiny_patch16_224, or give "
                "model.pretrained, a folder whose config.json names one"
            )
        timm = _timm()
        if not timm.is_model(name):
            raise ConfigError(
                f"model.architecture={name}: timm {timm.__version__} has no such model"
                f"{nearest(name.partition('.')[0], timm.list_models())}"
            )
        return name

    @cached_property
    def _saved(self) -> dict[str, Any]:
        """The content of ``config.json`` in the folder ``pretrained``; empty if there is no such file."""
        if not self.pretrained:
            return {}
        path = Path(self.pretrained).expanduser() / "config.json"
        if not path.is_file():
            return {}
        try:
            found = json.loads(read_text(path, SMALL_BYTES))
            return dict(found)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"model.pretrained={self.pretrained}: {path} is not in timm's format ({error}); give a folder that "
                "save_for_hf of timm wrote, or a safetensors file and model.architecture"
            ) from error

    @property
    def _saved_arguments(self) -> dict[str, Any]:
        """The constructor arguments in ``config.json``; empty if this file is for another architecture."""
        if self._saved.get("architecture") != self._architecture.partition(".")[0]:
            return {}
        found = dict(self._saved.get("model_args") or {})
        return {**{k: self._saved[k] for k in ("num_classes",) if k in self._saved}, **found}


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ConfigError(
            f"model=timm: it needs timm and torchvision ({error}); install them with pip install 'parallax-train[timm]'"
        ) from error
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise
        build = torch.__version__.partition("+")[2] or "cpu"
        raise ConfigError(
            f"model=timm: torchvision does not match torch {torch.__version__} ({error}); run pip install "
            f"--force-reinstall --no-deps torchvision --index-url https://download.pytorch.org/whl/{build}"
        ) from error
    return timm

"""The function that builds a model from its configuration. Class paths come from the user's own configuration only,
never from a checkpoint, a plan or a profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from parallax.common.targets import call_target
from parallax.errors import check_switch
from parallax.model.factory.adapters import adapted
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.factory.timm import TimmConfig
from parallax.model.gpt import GPTConfig
from parallax.model.mlp import MLPConfig
from parallax.plan.analytic.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class CustomModelConfig:
    """The user's own model.

    ``target``: the factory as ``package.module:function``; it returns any nn.Module. ``kwargs``: its arguments,
    ``model.kwargs.width=64`` on a command line. ``blocks``: the chain of blocks, if the automatic one
    (:func:`~parallax.model.describe.describe`) does not suit: module paths in the order of data flow, ``*`` for the
    members of a ModuleList (``[embed, layers.*, norm, head]``). ``weights``: a safetensors file, or a folder of them,
    with initial weights. ``adapter``: adapters to train instead of the model, in peft's own keys
    (:mod:`parallax.model.factory.adapters`). ``verify``: compare the chain with the model's own forward before the
    first step: true, false, or auto (once per model, :func:`~parallax.model.verification.verify.verify`).
    """

    name: str = "custom"
    target: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    weights: str = ""
    adapter: dict[str, Any] = field(default_factory=dict)
    verify: bool | str = "auto"

    def __post_init__(self) -> None:
        check_switch("model.verify", self.verify)

    def build(self) -> nn.Module:
        model: nn.Module = call_target("model", self.target, self.kwargs)
        return model


BuiltModelConfig = GPTConfig | MLPConfig | CustomModelConfig | HuggingFaceConfig | TimmConfig
"""Models that can be built and trained."""
AdaptableModelConfig = CustomModelConfig | HuggingFaceConfig | TimmConfig
"""Models that support weight files and adapters."""
ModelConfig = BuiltModelConfig | TransformerConfig
"""All models; a TransformerConfig has sizes only, for planning."""


def build_model(config: BuiltModelConfig) -> nn.Module:
    """Return the model of ``config``, with its adapters. Weight files are read here only for adapters; otherwise each
    stage reads its own (:func:`weights_of`)."""
    model = config.build()
    if isinstance(config, AdaptableModelConfig) and config.adapter:
        unread = "" if isinstance(config, TimmConfig) else config.weights
        return adapted(
            model, config.adapter, unread, incomplete=isinstance(config, HuggingFaceConfig)
        )
    return model


def weights_of(config: BuiltModelConfig) -> str:
    """Return the location of weights that :func:`build_model` does not read; empty: there are none."""
    if isinstance(config, CustomModelConfig | HuggingFaceConfig) and not config.adapter:
        return config.weights
    return ""


def base_of(config: BuiltModelConfig, seed: int) -> str:
    """Return a text that identifies the base of a model with adapters; empty without adapters."""
    if not isinstance(config, AdaptableModelConfig) or not config.adapter:
        return ""
    made = config.target if isinstance(config, CustomModelConfig) else config.architecture
    return f"weights {config.weights}" if config.weights else f"{made} with seed {seed}"

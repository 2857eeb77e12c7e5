"""Build the user's own model.

The path of the model's factory must come from the user's own configuration, never from a checkpoint, a plan or a
profile.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from parallax.common.targets import call_target
from parallax.errors import check_switch
from parallax.model.construction.deferred import deferred_init
from parallax.model.factory.adapters import AdaptableModelConfig

_TAKES_LABELS: dict[str, bool] = {}  # by factory and arguments, because models take time to build


@dataclass(frozen=True, kw_only=True)
class CustomModelConfig(AdaptableModelConfig):
    """The user's own model.

    ``target``: the factory as ``package.module:function``. It returns any nn.Module.
    ``kwargs``: arguments of the factory, for example ``model.kwargs.width=64`` on a command line. If there is an
        argument ``sequence``, it is also the number of tokens in a row of text. If there is an argument ``vocabulary``,
        it is also the number of tokens that the model knows. Without such an argument, the number is 256.
    ``blocks``: module paths of the chain's blocks, in the order of data flow. ``*`` stands for the members of a
        ModuleList (``[embed, layers.*, norm, head]``). If empty, blocks are found automatically
        (:func:`~parallax.model.describe.describe`).
    ``weights``: a safetensors file, or a folder of them, with initial weights.
    ``adapter``: adapters to train instead of the model, in peft's own keys (:mod:`parallax.model.factory.adapters`).
    ``verify``: whether to compare the chain with the model's own forward before the first step: true, false, or auto
        (once per model, :func:`~parallax.model.verification.verify.verify`).
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

    @property
    def sequence(self) -> int:
        return self._number("sequence", super().sequence)

    @property
    def vocabulary(self) -> int:
        return self._number("vocabulary", super().vocabulary)

    def _number(self, name: str, default: int) -> int:
        """Return the factory's argument ``name`` if it is a whole number, otherwise ``default``."""
        found = self.kwargs.get(name)
        return found if isinstance(found, int) and not isinstance(found, bool) else default

    @property
    def takes_labels(self) -> bool:
        key = repr((self.target, self.kwargs))
        if key not in _TAKES_LABELS:
            forward = deferred_init(self.create, seed=0).model.forward
            _TAKES_LABELS[key] = "labels" in inspect.signature(forward).parameters
        return _TAKES_LABELS[key]

    @property
    def block_paths(self) -> Sequence[str]:
        return self.blocks

    @property
    def built_of(self) -> str:
        return self.target

    def create(self) -> nn.Module:
        model: nn.Module = call_target("model", self.target, self.kwargs)
        return model

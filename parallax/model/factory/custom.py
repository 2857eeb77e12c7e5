"""Build the user's own model.

The path of its factory comes from the user's own configuration only, never from a checkpoint, a plan or a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from parallax.common.targets import call_target
from parallax.errors import check_switch
from parallax.model.factory.adapters import AdaptableModelConfig


@dataclass(frozen=True, kw_only=True)
class CustomModelConfig(AdaptableModelConfig):
    """The user's own model.

    ``target``: the factory as ``package.module:function``; it returns any nn.Module. ``kwargs``: arguments of the
    factory, for example ``model.kwargs.width=64`` on a command line. The arguments ``sequence`` and ``vocabulary``, if
    given, also set the number of tokens in a row of text and the number of tokens that the model knows (256 each
    without them). ``blocks``: the chain of blocks, if the automatic one (:func:`~parallax.model.describe.describe`)
    does not suit: module paths in the order of data flow, ``*`` for the members of a ModuleList (``[embed, layers.*,
    norm, head]``). ``weights``: a safetensors file, or a folder of them, with initial weights. ``adapter``: adapters to
    train instead of the model, in peft's own keys (:mod:`parallax.model.factory.adapters`). ``verify``: compare the
    chain with the model's own forward before the first step: true, false, or auto (once per model,
    :func:`~parallax.model.verification.verify.verify`).
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
        """Return the argument ``name`` of the factory if it is a whole number, otherwise ``default``."""
        found = self.kwargs.get(name)
        return found if isinstance(found, int) and not isinstance(found, bool) else default

    @property
    def block_paths(self) -> Sequence[str]:
        return self.blocks

    @property
    def built_of(self) -> str:
        return self.target

    def create(self) -> nn.Module:
        model: nn.Module = call_target("model", self.target, self.kwargs)
        return model

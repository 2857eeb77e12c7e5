"""The base class of the ``model=`` options, through which a run gets its model."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from parallax.common.registered import Registered
from parallax.plan.work import ModelWork

DEFAULT_SEQUENCE = 256  # tokens in a row of text for a model that names no length
BYTES = 256  # values that a byte can have


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Registered):
    """The base class of the options of ``model=``, the settings that build a model.

    Each option is a dataclass in a separate module of :mod:`parallax.model.factory`, and overrides methods of this
    class.
    """

    package: ClassVar[str] = "parallax.model.factory"

    @property
    def verify(self) -> bool | str:
        """Whether to compare the chain with the model's own forward: true, false or auto."""
        return False

    @property
    def sequence(self) -> int:
        """The number of tokens in a row of text."""
        return DEFAULT_SEQUENCE

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows; 0 for a model without text inputs."""
        return BYTES

    @property
    def block_paths(self) -> Sequence[str]:
        """The module paths of the chain's blocks; empty if they are to be found automatically."""
        return ()

    @abc.abstractmethod
    def build(self) -> nn.Module:
        """Return the model, with its adapters, on torch's default device."""

    def check_code(self) -> None:
        """Raise :class:`~parallax.errors.ConfigError` if the model is
        described only by sizes, so that it cannot be built.
        """

    def work(self, precision: str = "bf16") -> ModelWork | None:  # noqa: ARG002
        """Return the operations and bytes of a model whose sizes are known.

        None for other models, whose operators must be counted.
        """
        return None

    @property
    def stage_weights(self) -> str:
        """The files of initial weights from which each stage reads its own part.

        Empty if there are none, or if :meth:`build` reads them.
        """
        return ""

    @property
    def partial_weights(self) -> bool:
        """Whether the files of :attr:`stage_weights` may lack tensors, such as those of a new head."""
        return False

    def base(self, seed: int) -> str:  # noqa: ARG002
        """Return a text that identifies the base model below the adapters; empty without adapters."""
        return ""

    @property
    def libraries(self) -> Sequence[str]:
        """The modules that building the model imports and that take long to import."""
        return ()

    @property
    def exported_from(self) -> str:
        """The transformers folder from which the model was loaded; empty if there is none."""
        return ""

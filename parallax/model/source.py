"""The base class of the options of ``model=``, from which a run gets its model."""

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
    """The base class of the options of ``model=``, which are settings that build a model.

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
        """The size of the vocabulary; 0 for a model without text inputs."""
        return BYTES

    @property
    def takes_labels(self) -> bool:
        """Whether the model's forward has an argument ``labels``, with which the model computes its loss."""
        return False

    @property
    def block_paths(self) -> Sequence[str]:
        """The module paths of the chain's blocks; empty: blocks are found automatically."""
        return ()

    @abc.abstractmethod
    def build(self) -> nn.Module:
        """Return the model, with its adapters, on torch's default device."""

    def check_code(self) -> None:
        """Raise :class:`~parallax.errors.ConfigError` if the model has no code, because only its sizes are known."""

    def work(self, precision: str = "bf16") -> ModelWork | None:  # noqa: ARG002
        """Return the operations and bytes of the model in the number format ``precision``, computed from the model's
        sizes.

        None if they must be counted by running the model's operators.
        """
        return None

    @property
    def stage_weights(self) -> str:
        """The file or folder of initial weights from which each stage reads its own part.

        Empty if there is none, or if :meth:`build` reads the weights.
        """
        return ""

    @property
    def partial_weights(self) -> bool:
        """Whether the files of :attr:`stage_weights` may lack tensors, such as those of a new head."""
        return False

    def base(self, seed: int) -> str:  # noqa: ARG002
        """Return a text that identifies the model to which adapters were added; empty without adapters.

        ``seed``: the run's seed. It is part of the text if no files provide the initial values of that model.
        """
        return ""

    @property
    def libraries(self) -> Sequence[str]:
        """The names of the modules that :meth:`build` imports, if their import takes long."""
        return ()

    @property
    def exported_from(self) -> str:
        """The transformers folder from which the model was loaded; empty if there is none."""
        return ""

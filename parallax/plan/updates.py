"""When an optimizer step becomes the weights of the model."""

from __future__ import annotations

from enum import StrEnum


class Updates(StrEnum):
    """The gradient that a step uses: that of the newest weights, or that of weights one version older."""

    SYNCHRONOUS = "synchronous"
    DELAYED = "delayed"

    @property
    def delays(self) -> bool:
        return self is Updates.DELAYED

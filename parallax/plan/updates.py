"""The setting ``trainer.updates``: whether gradients are computed with the newest weights or with weights that are one
step older."""

from __future__ import annotations

from enum import StrEnum


class Updates(StrEnum):
    """Whether the gradient of a step is that of the newest weights (synchronous), or that of the weights before the
    last update (delayed)."""

    SYNCHRONOUS = "synchronous"
    DELAYED = "delayed"

    @property
    def delays(self) -> bool:
        return self is Updates.DELAYED

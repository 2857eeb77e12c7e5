"""No averaged weights."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.runtime.optim.ema import EmaConfig


@dataclass(frozen=True, kw_only=True)
class EmaOff(EmaConfig):
    """No averages."""

    name: str = "off"

    @property
    def averages(self) -> bool:
        return False

    def share(self, step: int, updates: int) -> float:
        del step, updates
        return 0.0

"""An exponential moving average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import ConfigError, check_choice, check_positive
from parallax.plan.tier import AUTO
from parallax.runtime.optim.ema import EmaConfig


@dataclass(frozen=True, kw_only=True)
class EmaOn(EmaConfig):
    """An exponential moving average, as in ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``. The
    first update copies the weights.

    ``decay``: the weight of the old average in each update.
    ``warmup``: auto limits the decay of the n-th update after the first to ``(1 + n) / (10 + n)``, so that the average
        soon forgets the first weights; off always uses the full decay.
    ``every``: steps between updates.
    ``evaluate``: compute validation losses with the averages; these losses also select the best checkpoint.
    """

    name: str = "on"
    decay: float = 0.999
    warmup: str = AUTO
    every: int = 1
    evaluate: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"ema.decay={self.decay}: accepted are numbers from 0 to below 1")
        check_choice("ema.warmup", self.warmup, [AUTO, "off"])
        check_positive("ema.every", self.every)

    @property
    def evaluates(self) -> bool:
        return self.evaluate

    def share(self, step: int, updates: int) -> float:
        if step % self.every:
            return 0.0
        if not updates:
            return 1.0
        decay = self.decay
        if self.warmup == AUTO:
            decay = min(decay, (1 + updates) / (10 + updates))
        return 1 - decay

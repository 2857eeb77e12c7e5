"""The settings of averaged weights, with the base class of the options of ``ema=``, and a counter of their updates."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from parallax.common.registered import Registered
from parallax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EmaConfig(Registered):
    """Averages of the weights over the steps, kept beside the trained weights as one more state of the optimizer. The
    base class of the dataclasses of ``ema=``.

    Averages have the precision of the master weights. Plans reserve memory for them, and checkpoints contain them.
    Buffers, such as the statistics of BatchNorms, are not averaged. A run that resumes from a checkpoint without
    averages starts them at its next update.
    """

    package: ClassVar[str] = "parallax.runtime.optim.emas"

    @property
    def averages(self) -> bool:
        """Whether the run keeps averages."""
        return True

    @property
    def evaluates(self) -> bool:
        """Whether validation uses the averages."""
        return False

    @abc.abstractmethod
    def share(self, step: int, updates: int) -> float:
        """Return the weight of the new values in the averages at ``step`` (from 1), or 0 if this step does not update
        the averages. ``updates``: the number of updates so far."""

    def check(self, steps: int) -> None:
        """Raise :class:`ConfigError` if a run of ``steps`` steps would never update the averages."""
        if self.averages and not any(self.share(step, 0) for step in range(1, steps + 1)):
            raise ConfigError(
                f"ema={self.name}: the run ends after step {steps}, before the first weights are averaged; lower "
                "ema.start or ema.every"
            )


class Averages:
    """Counts the updates of a run's averages."""

    def __init__(self, config: EmaConfig) -> None:
        self.config, self.updates = config, 0

    def share(self, step: int) -> float:
        """Return the weight of the new values in the averages at ``step`` (from 1), and count an update if the weight
        is not 0."""
        share = self.config.share(step, self.updates)
        self.updates += share > 0
        return share

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values; empty without averages."""
        return {"updates": self.updates} if self.config.averages else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state` returned."""
        self.updates = int(state.get("updates", 0)) if self.config.averages else 0

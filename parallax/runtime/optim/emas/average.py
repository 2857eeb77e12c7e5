"""The mean of the weights over the final steps of a run."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import check_positive
from parallax.runtime.optim.ema import EmaConfig


@dataclass(frozen=True, kw_only=True)
class EmaAverage(EmaConfig):
    """The mean of the weights of all averaged steps, as in ``torch.optim.swa_utils.AveragedModel`` (stochastic weight
    averaging, Izmailov et al. 2018).

    ``start``: the first step whose weights are averaged; before it, validation uses the trained weights.
    ``every``: steps from one averaging to the next.
    ``evaluate``: compute validation losses with the averages; these losses also select the best checkpoint.
    """

    name: str = "average"
    start: int = 1
    every: int = 1
    evaluate: bool = True

    def __post_init__(self) -> None:
        check_positive("ema.start", self.start)
        check_positive("ema.every", self.every)

    @property
    def evaluates(self) -> bool:
        return self.evaluate

    def share(self, step: int, updates: int) -> float:
        if step < self.start or (step - self.start) % self.every:
            return 0.0
        return 1 / (updates + 1)

"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from parallax.errors import ConfigError
from parallax.runtime.optim.algorithms import SGD, Momentum
from parallax.runtime.optim.config import Group, OptimizerConfig, check_momentum, fuses


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimizerConfig):
    """SGD with the values of torch's own examples: no weight decay, no clipping.

    ``momentum``: the momentum factor; 0 keeps no state.
    ``nesterov``: use Nesterov's momentum.
    ``weight_decay`` is added to the gradient.
    """

    moves_bytes_only: ClassVar[bool] = True

    name: str = "sgd"
    lr: float = 0.01
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum("momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov=true: it needs optimizer.momentum above 0")

    def create(self, groups: Sequence[Group]) -> Optimizer:
        return (Momentum if self.momentum else SGD)(
            groups,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=fuses(groups),
        )

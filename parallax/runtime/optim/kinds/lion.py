"""Lion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from parallax.runtime.optim.algorithms import Lion
from parallax.runtime.optim.config import Group, OptimizerConfig, check_betas


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimizerConfig):
    """Lion, with a third of AdamW's learning rate and three times its weight decay, so that the product of both is the
    same (Chen et al. 2023, section 5). ``betas``: the two decay factors in the paper's algorithm 2."""

    moves_bytes_only: ClassVar[bool] = True

    name: str = "lion"
    lr: float = 3e-4
    weight_decay: float = 0.3
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self.betas)

    def create(self, groups: Sequence[Group]) -> Optimizer:
        return Lion(groups, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)

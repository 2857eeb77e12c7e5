"""AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from parallax.errors import check_positive
from parallax.runtime.optim.algorithms import AdamW
from parallax.runtime.optim.config import Group, OptimizerConfig, check_betas, fuses


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019), with the usual values of decoders (Brown et al. 2020, appendix B; Touvron et
    al. 2023, section 2.3). ``betas``: decay of the averages of gradients and of their squares. ``eps`` is added to the
    denominator."""

    moves_bytes_only: ClassVar[bool] = True

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("optimizer.eps", self.eps)
        check_betas(self.betas)

    def create(self, groups: Sequence[Group]) -> Optimizer:
        return AdamW(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=fuses(groups),
        )

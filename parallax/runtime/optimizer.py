"""AdamW with warm-up and cosine decay; weight decay only where it is meant to act."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from parallax.errors import ConfigError, check_choice, check_positive


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019): decoupled weight decay on matrices, none on vectors.

    The learning rate rises linearly over ``warmup_steps`` and falls along a cosine to ``final_rate`` × ``lr`` at
    the last step. ``clip_norm`` bounds the global gradient norm over all stages; 0 leaves gradients as they are.
    """

    name: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 10
    final_rate: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, ["adamw"])
        check_positive("optimizer.lr", self.lr)
        check_positive("optimizer.eps", self.eps)
        for key in ("weight_decay", "warmup_steps", "final_rate", "clip_norm"):
            check_positive(f"optimizer.{key}", getattr(self, key), zero=True)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas={list(self.betas)}: accepted are two numbers in [0, 1)")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of ``step`` (from 0) in a run of ``steps``."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.lr * (self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    def build(self, parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
        """The optimizer over the trainable ``parameters`` of one stage, in two weight-decay groups; over an empty one
        on ``device`` where a stage trains nothing, which torch would refuse."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        trained = trained or [nn.Parameter(torch.empty(0, device=device))]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self.lr, betas=self.betas, eps=self.eps, fused=True
        )

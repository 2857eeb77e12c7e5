"""Muon for the matrices of hidden layers, with AdamW for all else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from parallax.errors import check_positive
from parallax.runtime.optim.algorithms import AdamW, Muon, Uncompiled
from parallax.runtime.optim.config import (
    Group,
    OptimizerConfig,
    check_betas,
    check_momentum,
    fuses,
)
from parallax.runtime.optim.places import ParameterPlace


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024), ``torch.optim.Muon``, for matrices that are neither embeddings nor in the model's last
    module; AdamW for all other parameters. Muon's update has the size of AdamW's (Liu et al. 2025, "Muon is Scalable
    for LLM Training", section 2.2), so both use one learning rate and one weight decay. ``momentum``: the momentum of
    Muon. ``betas`` and ``eps``: those of AdamW, which also steps every group with ``muon: false``."""

    name: str = "muon"
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("optimizer.eps", self.eps)
        check_betas(self.betas)
        check_momentum("momentum", self.momentum)

    def create(self, groups: Sequence[Group]) -> Optimizer:
        return MuonWithAdamW(
            groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            betas=self.betas,
            eps=self.eps,
        )

    def settings_of(self, place: ParameterPlace) -> Group:
        embeds = any("Embedding" in kind for kind in place.kinds)
        if place.dims == 2 and not embeds and not place.is_output:
            return {"muon": True}
        return super().settings_of(place)


class MuonWithAdamW(Uncompiled):
    """Steps the groups with ``muon=True`` by ``torch.optim.Muon``, and the others by AdamW."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        some, fused = [torch.empty(0, 0)], fuses(groups)
        muon = Muon(some, momentum=momentum, adjust_lr_fn="match_rms_adamw").defaults
        adamw = AdamW(some, betas=betas, eps=eps, fused=fused).defaults
        both = {"lr": lr, "weight_decay": weight_decay}
        defaults = {True: {**muon, **both, "muon": True}, False: {**adamw, **both, "muon": False}}
        super().__init__(
            [{**defaults[bool(group.get("muon", False))], **group} for group in groups],
            {**defaults[True], **defaults[False]},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run one update; ``closure``, if given, computes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, algorithm in ((True, Muon), (False, AdamW)):
            part: Optimizer = object.__new__(algorithm)
            mine = [group for group in self.param_groups if group["muon"] is kind]
            vars(part).update(vars(self), param_groups=mine)
            if any(group["params"] for group in mine):
                part.step()
        return loss

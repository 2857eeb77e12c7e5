"""An optimizer class of torch, of another library, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from parallax.common.targets import call_target, load_target
from parallax.runtime.optim.config import Group, OptimizerConfig, check_optimizer
from parallax.runtime.optim.places import ParameterPlace


@dataclass(frozen=True, kw_only=True)
class CustomOptimizerConfig(OptimizerConfig):
    """Any optimizer class. Before step 1 it is tried on small tensors. This shows whether it steps each parameter
    independently, which every plan needs. It also shows whether it steps each element independently; only then may a
    plan divide parameters.

    ``target``: the class as ``package.module:Class``, such as ``torch.optim:Adafactor``, or a function that takes
        parameter groups and returns the optimizer.
    ``kwargs``: the arguments of the class besides the parameters and ``lr``.
    ``weight_decay`` applies to all parameters, as it does for a torch optimizer without groups; 0 leaves the class's
        default.
    """

    name: str = "custom"
    target: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.0

    @property
    def label(self) -> str:
        return self.target

    def create(self, groups: Sequence[Group]) -> Optimizer:
        load_target("optimizer.target", self.target)
        decay = {"weight_decay": self.weight_decay} if self.weight_decay else {}
        arguments = {"lr": self.lr, **decay, **self.kwargs}
        made = call_target("optimizer", self.target, arguments, [dict(group) for group in groups])
        return check_optimizer("optimizer.target", self.target, made)

    def settings_of(self, place: ParameterPlace) -> Group:
        del place
        return {}

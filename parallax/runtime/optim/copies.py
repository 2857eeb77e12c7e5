"""Marks copies of offloaded parameters, so that no optimizer steps the copies by mistake.

:attr:`Engine.parameters` returns such copies. A user's optimizer on these copies would step tensors without gradients,
which trains nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallax.errors import ConfigError

_NAME = "_parallax_copy_of"


def mark_copy(value: Tensor, name: str) -> Tensor:
    """Mark ``value`` as a copy of the parameter ``name``. An optimizer that steps it raises :class:`ConfigError`."""
    _watch_optimizers()
    setattr(value, _NAME, name)
    return value


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_copies)


def _refuse_copies(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    copied = [getattr(p, _NAME, "") for group in optimizer.param_groups for p in group["params"]]
    if any(copied):
        raise ConfigError(
            f"{type(optimizer).__name__} has {sum(map(bool, copied))} copies of offloaded parameters "
            f"({next(filter(None, copied))}), so it would train nothing: give Engine.build(optimizer=...) a function "
            "that takes parameter groups and returns it, and call engine.step(); or set plan.parameters=device"
        )

"""The settings of an optimizer, with the base class of the options of ``optimizer=``."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from parallax.common.registered import Registered
from parallax.errors import ConfigError, check_positive
from parallax.runtime.optim.places import ParameterPlace

Group = dict[str, Any]
"""A parameter group as torch's optimizers take it: ``params`` and settings."""
CLIPS = "clip_norm", "clip_value"
"""The settings of a group that are Parallax's own, not the optimizer's."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Registered):
    """Settings from which optimizers are built: the base class of the dataclasses of ``optimizer=``.

    Each dataclass is in its own module of :mod:`parallax.runtime.optim.kinds`.

    ``lr``: the learning rate, which the schedule multiplies.
    ``weight_decay`` applies to matrices only.
    ``clip_norm`` bounds the global gradient norm over all stages; 0 turns clipping off.
    ``clip_value`` bounds each element of a gradient, after ``clip_norm``; 0 turns this off.
    ``layer_decay``: the learning rate of a layer is multiplied by this factor once for each later layer. Layers are
        told apart by the first number in the names of their parameters.
    ``delay_correction``: with ``trainer.updates=delayed``, compute gradients with predicted weights, the newest ones
        plus their last change. It needs memory for one more copy of the weights.
    ``groups``: settings of some parameters, ``[{match: "*.bias|norm.*", weight_decay: 0}, {match: "head.*", lr: 0.001},
        {match: "layers.{0..3}.*", freeze: true}]``. ``match``: a pattern of parameter names; ``type``: the class of the
        parameter's module; ``dims``: the number of its dimensions. A parameter belongs to the first group of which it
        fits all of these keys. The other keys of a group are settings of the optimizer; ``freeze: true`` trains none of
        the group's parameters. A group with its own ``clip_norm`` is clipped by the norm of its own gradients. All
        other gradients are clipped by their common norm and ``optimizer.clip_norm``. A group's own ``clip_value``
        bounds the elements of its gradients.
    """

    package: ClassVar[str] = "parallax.runtime.optim.kinds"
    moves_bytes_only: ClassVar[bool] = False
    """Whether the step is one fused kernel over elements, whose time follows from the bytes that it moves."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    clip_value: float = 0.0
    layer_decay: float = 1.0
    delay_correction: bool = False
    groups: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_positive("optimizer.lr", self.lr)
        for key in ("weight_decay", "clip_norm", "clip_value"):
            check_positive(f"optimizer.{key}", getattr(self, key), zero=True)
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(
                f"optimizer.layer_decay={self.layer_decay}: accepted are numbers above 0 up to 1"
            )

    @property
    def label(self) -> str:
        """The optimizer's name in error messages, and in checkpoints with its states."""
        return self.name

    @abc.abstractmethod
    def create(self, groups: Sequence[Group]) -> Optimizer:
        """Return the optimizer over the parameters of ``groups``."""

    def settings_of(self, place: ParameterPlace) -> Group:
        """Return the settings of the parameter at ``place`` that differ from those of the whole optimizer."""
        return {} if place.dims >= 2 else {"weight_decay": 0.0}


@dataclass(frozen=True, kw_only=True)
class OptimizerFactory(OptimizerConfig):
    """An optimizer that the caller's function ``factory(groups)`` returns; only Python code can configure it. By
    default, every parameter has the settings that the function gives the optimizer, and no gradient is clipped."""

    factory: Callable[[Sequence[Group]], Optimizer]
    clip_norm: float = 0.0

    @property
    def name(self) -> str:
        return getattr(self.factory, "__qualname__", type(self.factory).__qualname__)

    def create(self, groups: Sequence[Group]) -> Optimizer:
        return check_optimizer("optimizer", self.name, self.factory(groups))

    def settings_of(self, place: ParameterPlace) -> Group:
        del place
        return {}


def as_config(
    optimizer: OptimizerConfig | Callable[[Sequence[Group]], Optimizer],
) -> OptimizerConfig:
    """Return ``optimizer`` if it is a config; if it is a function, a config that calls it."""
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    return OptimizerFactory(factory=optimizer)


def check_optimizer(key: str, name: str, made: Any) -> Optimizer:
    """Return ``made``, the result of the user's function called ``name``, which the setting or argument ``key`` gave.
    Raises :class:`ConfigError` if ``made`` is not an optimizer."""
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"{key}={name}: it returned a {type(made).__name__}; accepted is one torch.optim.Optimizer over the "
            "parameter groups that it is given"
        )
    return made


def check_betas(betas: Sequence[float]) -> None:
    """Raise :class:`ConfigError` unless ``betas`` are two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optimizer.betas={list(betas)}: accepted are two numbers in [0, 1)")


def check_momentum(key: str, momentum: float) -> None:
    """Raise :class:`ConfigError` unless ``momentum``, the value of the setting ``key``, is in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ConfigError(f"optimizer.{key}={momentum}: accepted are numbers in [0, 1)")


def fuses(groups: Sequence[Group]) -> bool:
    """Whether torch has fused kernels for the parameters of ``groups``. It has none for complex parameters."""
    return not any(torch.is_complex(p) for group in groups for p in group["params"])

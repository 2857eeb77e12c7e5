"""Parallax trains PyTorch models that are too large for their devices."""

from typing import TYPE_CHECKING

from parallax.errors import ParallaxError
from parallax.machine import ClusterConfig
from parallax.model.describe import describe
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Plan
from parallax.plan.request import PlanConfig
from parallax.plan.schedule import register_schedule
from parallax.planning import plan_model, plan_together
from parallax.runtime.batch import Rows, TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.optimizer import OptimizerConfig
from parallax.swap.config import SwapConfig

if TYPE_CHECKING:  # at run time the package itself is called
    from parallax.swap.scope import swap
else:
    from parallax import swap

__version__ = "0.1.0"

__all__ = [
    "ClusterConfig",
    "Engine",
    "OptimizerConfig",
    "ParallaxError",
    "Plan",
    "PlanConfig",
    "PrecisionConfig",
    "Rows",
    "SwapConfig",
    "TensorRows",
    "describe",
    "plan_model",
    "plan_together",
    "register_schedule",
    "swap",
]

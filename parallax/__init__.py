"""Parallax trains PyTorch models that are too large for their devices.

Names are imported at their first use, because importing torch takes seconds. So a command that is interrupted during
this import can already report it, and commands that only plan do not import torch.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.errors import ParallaxError
    from parallax.machine.local import ClusterConfig
    from parallax.model.describe import describe
    from parallax.model.precision import PrecisionConfig
    from parallax.plan.config import PlanConfig
    from parallax.plan.plan import Plan
    from parallax.plan.schedule import register_schedule
    from parallax.run.planning import plan_model, plan_together
    from parallax.runtime.batch import Rows, TensorRows
    from parallax.runtime.engine import Engine
    from parallax.runtime.optim.optimizer import OptimizerConfig
    from parallax.swap.config import SwapConfig
    from parallax.swap.lms.scope import swap
    from parallax.swap.stores.tiers import register_tier

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
    "register_tier",
    "swap",
]

_HOMES = {
    "ClusterConfig": "machine.local",
    "Engine": "runtime.engine",
    "OptimizerConfig": "runtime.optim.optimizer",
    "ParallaxError": "errors",
    "Plan": "plan.plan",
    "PlanConfig": "plan.config",
    "PrecisionConfig": "model.precision",
    "Rows": "runtime.batch",
    "SwapConfig": "swap.config",
    "TensorRows": "runtime.batch",
    "describe": "model.describe",
    "plan_model": "run.planning",
    "plan_together": "run.planning",
    "register_schedule": "plan.schedule",
    "register_tier": "swap.stores.tiers",
    "swap": "swap",  # the package itself is called
}

if not TYPE_CHECKING:  # so that a type checker knows the names

    def __getattr__(name: str) -> Any:
        """Return a public name, or a module of the package, and import it if needed."""
        if name not in _HOMES:
            if (
                not name.startswith("_")
                and importlib.util.find_spec(f"{__name__}.{name}") is not None
            ):
                return importlib.import_module(f"{__name__}.{name}")
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        globals()[name] = found = home if _HOMES[name] == name else getattr(home, name)
        return found

    def __dir__() -> list[str]:
        """Return all names, imported or not."""
        return sorted({*globals(), *__all__})

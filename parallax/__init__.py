"""Parallax trains PyTorch models that are too large for their devices.

Public names are imported at their first use, because importing torch takes seconds. Commands that only plan do not
import it, and other commands handle Ctrl-C before the import begins.
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
    from parallax.runtime.optim.kinds.adamw import AdamWConfig
    from parallax.runtime.optim.kinds.lion import LionConfig
    from parallax.runtime.optim.kinds.muon import MuonConfig
    from parallax.runtime.optim.kinds.sgd import SGDConfig
    from parallax.runtime.optim.schedules.constant import ConstantSchedule
    from parallax.runtime.optim.schedules.cosine import CosineSchedule
    from parallax.runtime.optim.schedules.linear import LinearSchedule
    from parallax.runtime.optim.schedules.step import StepSchedule
    from parallax.runtime.optim.schedules.wsd import WSDSchedule
    from parallax.swap.config import SwapConfig
    from parallax.swap.lms.scope import swap
    from parallax.swap.stores.tiers import register_tier
    from parallax.train.callbacks import Callback, TrainingRun

__version__ = "0.1.0"

__all__ = [
    "AdamWConfig",
    "Callback",
    "ClusterConfig",
    "ConstantSchedule",
    "CosineSchedule",
    "Engine",
    "LinearSchedule",
    "LionConfig",
    "MuonConfig",
    "ParallaxError",
    "Plan",
    "PlanConfig",
    "PrecisionConfig",
    "Rows",
    "SGDConfig",
    "StepSchedule",
    "SwapConfig",
    "TensorRows",
    "TrainingRun",
    "WSDSchedule",
    "describe",
    "plan_model",
    "plan_together",
    "register_schedule",
    "register_tier",
    "swap",
]

_HOMES = {
    "AdamWConfig": "runtime.optim.kinds.adamw",
    "Callback": "train.callbacks",
    "ClusterConfig": "machine.local",
    "ConstantSchedule": "runtime.optim.schedules.constant",
    "CosineSchedule": "runtime.optim.schedules.cosine",
    "Engine": "runtime.engine",
    "LinearSchedule": "runtime.optim.schedules.linear",
    "LionConfig": "runtime.optim.kinds.lion",
    "MuonConfig": "runtime.optim.kinds.muon",
    "ParallaxError": "errors",
    "Plan": "plan.plan",
    "PlanConfig": "plan.config",
    "PrecisionConfig": "model.precision",
    "Rows": "runtime.batch",
    "SGDConfig": "runtime.optim.kinds.sgd",
    "StepSchedule": "runtime.optim.schedules.step",
    "SwapConfig": "swap.config",
    "TensorRows": "runtime.batch",
    "WSDSchedule": "runtime.optim.schedules.wsd",
    "TrainingRun": "train.callbacks",
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

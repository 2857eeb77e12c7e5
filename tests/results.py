"""What a run or an engine has to show, as tests compare it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from parallax.runtime.engine import Engine


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl`` in order; a last line cut short by a crash is skipped."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def gradients_by_name(engine: Engine) -> dict[str, Tensor]:
    """Model-wide name → gradient, wherever it is; those that have none are not there."""
    stage = engine._stage
    found = {name: stage.gradient(tensor) for name, tensor in stage.named_tensors().items()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}

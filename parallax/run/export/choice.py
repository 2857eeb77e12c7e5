"""Choose a checkpoint of a run: the last one, the best one, or that of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.errors import CheckpointError, ConfigError, printable
from parallax.run.resume import StoredRun
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints, step_of
from parallax.runtime.checkpoint.reading import read_metrics
from parallax.runtime.metrics.config import MetricsConfig

_USUAL = "validation_loss"  # the metric of checkpoints that lack ``checkpoint.metric``
_SHOWN = 12  # steps that an error lists


@dataclass(frozen=True, kw_only=True)
class CheckpointChoice:
    """The user's choice of a checkpoint. ``step``: the checkpoint of this step. ``best``: the checkpoint with the best
    ``checkpoint.metric``. If neither is set, the last checkpoint is chosen."""

    step: int | None = None
    best: bool = False

    def find(self, run: StoredRun) -> tuple[Path, str]:
        """Return the folder of the chosen checkpoint, and a message for the user that tells why it is the best; the
        message is empty unless ``best`` is set. Raises :class:`ConfigError`, with the existing steps, if there is no
        such checkpoint."""
        found = list_checkpoints(run.config.checkpoint.folder(run.directory, run.config.name))
        if not found:
            raise ConfigError(
                f"{printable(str(run.directory))} has no checkpoint yet: a run saves every trainer.checkpoint_every "
                "steps, at its end, and where SIGTERM or Ctrl-C ends it"
            )
        if self.step is not None:
            return _of_step(found, self.step), ""
        last = max(found, key=_history)
        if not self.best:
            return last, ""
        return _best(found, last, run.config.checkpoint.metric, run.config.metrics_config)


def _of_step(found: Sequence[Path], step: int) -> Path:
    for path in found:
        if step_of(path) == step:
            return path
    raise ConfigError(f"--step {step}: accepted are the existing checkpoints, {_steps(found)}")


def _best(
    found: Sequence[Path], last: Path, metric: str, metrics: MetricsConfig
) -> tuple[Path, str]:
    """Return the checkpoint in ``found`` with the best value of ``metric``, which is a loss or one of ``metrics``, and
    a message for the user with this value. If no checkpoint records ``metric``, the validation loss decides. Among
    checkpoints with equal values, the latest is chosen. Checkpoints after ``last`` are ignored, because the run did not
    resume from them."""
    found = [path for path in found if path.name <= last.name]
    for name in dict.fromkeys((metric, _USUAL)):
        values = {path: _value(path, name) for path in found}
        known = {path: value for path, value in values.items() if value is not None}
        if known:
            sign = 1 if metrics.higher_is_better(name) else -1
            best = max(known, key=lambda path: (sign * known[path], path.name))
            return (
                best,
                f"step {step_of(best)} has the best {name}, {known[best]:.4g}, of {_steps(list(known))}",
            )
    raise ConfigError(
        f"--best: no checkpoint records {metric}; name one of them with --step: {_steps(found)}. checkpoint.best=1 "
        "evaluates before each checkpoint"
    )


def _value(path: Path, metric: str) -> float | None:
    value = read_metrics(path).get(metric)
    usable = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if usable and value is not None else None


def _steps(found: Sequence[Path]) -> str:
    steps = [str(step_of(path)) for path in found]
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(steps[-_SHOWN:])}{more}"


def _history(checkpoint: Path) -> tuple[float, str]:
    """Return a sort key that puts checkpoints of a later start last and, within a start, those of a later step."""
    try:
        return CheckpointReader(checkpoint).started, checkpoint.name
    except CheckpointError:
        return -1.0, checkpoint.name

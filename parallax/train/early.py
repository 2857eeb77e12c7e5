"""Early stopping: reasons to end a run, by one metric of its held-out rows."""

from __future__ import annotations

import math
from typing import Any

from parallax.train.stop import Agreed


class TrackedMetric:
    """The best value of ``metric`` in the evaluations so far, and the number of evaluations since the best one; both
    are equal on all ranks. ``higher``: whether higher values are better. Checkpoints hold this state, so a resumed run
    ends after the same evaluation as an uninterrupted one."""

    def __init__(self, metric: str, *, higher: bool) -> None:
        self.metric, self._higher = metric, higher
        self.best: float | None = None
        self.since_best = 0
        """The number of evaluations since the best one."""

    def add(self, value: float | None) -> None:
        """Add the value of an evaluation. None and NaN are no improvement."""
        if value is None or math.isnan(value) or not self._improves(value):
            self.since_best += 1
        else:
            self.best, self.since_best = value, 0

    def reaches(self, target: float) -> bool:
        """Whether the best value is ``target`` or better."""
        if self.best is None:
            return False
        return self.best >= target if self._higher else self.best <= target

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        return value > self.best if self._higher else value < self.best

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "best": self.best, "since_best": self.since_best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which :meth:`state_dict` returned. The state of another metric is ignored."""
        if state.get("metric") == self.metric:
            self.best, self.since_best = state["best"], state["since_best"]


class OutOfPatience:
    """A reason to end the run: the metric has not improved for ``patience`` evaluations (0: no limit)."""

    name, at_checkpoints, ends, then = "patience", False, True, ""

    def __init__(self, tracked: TrackedMetric, patience: int) -> None:
        self._tracked, self._patience = tracked, patience

    def stop_requested(self) -> int:
        return int(0 < self._patience <= self._tracked.since_best)

    def message(self) -> str:
        """Return why the run ends: the metric has not improved for ``patience`` evaluations. The text is empty if the
        run continues."""
        known, best = (
            self._tracked,
            "-" if self._tracked.best is None else f"{self._tracked.best:.4f}",
        )
        why = f"{known.metric} has not improved on {best} in {known.since_best} evaluations"
        return f"{why}: training ends" if self.stop_requested() else ""

    def verdict(self) -> str:
        return ""

    def summary_entries(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:  # noqa: ARG002
        """Return the entry ``best_METRIC`` for the run's summary: the best value of the metric so far."""
        return {f"best_{self._tracked.metric}": self._tracked.best}


class TargetReached:
    """A reason to end the run: the metric has reached ``target`` (None: no target)."""

    name, at_checkpoints, ends, then = "target", False, True, ""

    def __init__(self, tracked: TrackedMetric, target: float | None) -> None:
        self._tracked, self._target = tracked, target

    def stop_requested(self) -> int:
        return int(self._target is not None and self._tracked.reaches(self._target))

    def message(self) -> str:
        """Return why the run ends: the metric has reached the target. The text is empty if the run continues."""
        why = f"{self._tracked.metric} has reached {self._target}: training ends"
        return why if self.stop_requested() else ""

    def verdict(self) -> str:
        return ""

    def summary_entries(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:  # noqa: ARG002
        """Return no entries for the run's summary: :class:`OutOfPatience` adds the best value."""
        return {}

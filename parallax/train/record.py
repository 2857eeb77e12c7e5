"""What one rank remembers of the steps of its run, and what is written of them at its end."""

from __future__ import annotations

import json
import os
import statistics
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from parallax.common.events import EventLog, Span, bubble_fraction, read_events
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.plan.plan import Plan
from parallax.plan.simulation.calibrate import seconds_by_term
from parallax.report import timeline_png
from parallax.report.occupancy import Occupancy, computed, occupancy_path
from parallax.report.swap import SwapRecord, swaps
from parallax.runtime.meters.step import StepResult
from parallax.train.monitor import Unwritten, finite
from parallax.train.nodes import events_path
from parallax.train.repeats import (
    METRICS,
    forget_steps,
    note_restart,
    noted_refusals,
    noted_restarts,
    told,
)

PREDICTED_EVENTS = "events-predicted.jsonl"
MEASURED_EVENTS = "events-measured.jsonl"  # the spans of all ranks for the step of median length
COMPLETE = "steps"  # how a run ended that took all of its steps
WARM_UP = 2  # steps left out of the median: first touches of memory, first connections
RECENT = 25  # steps whose spans are remembered, to find the one of median length


class RunRecord:
    """The steps so far. Rank 0 writes for all; what cannot be written is noted in ``unwritten``."""

    def __init__(self, mesh: Mesh, plan: Plan, directory: Path, unwritten: Unwritten) -> None:
        self._mesh, self._plan, self._directory = mesh, plan, directory
        self._unwritten = unwritten
        # Seconds and spans of steps.
        self._recent: deque[tuple[float, list[Span]]] = deque(maxlen=RECENT)
        self._losses: list[float] = []
        self._swap = SwapRecord()
        self._last: StepResult | None = None
        self._peak = 0
        self._measured: list[Span] = []
        self.seconds: list[float] = []
        self.validation_loss: float | None = None

    def begin(self, done: int) -> None:
        """The run goes on after step ``done``: what its files tell of later ones, they will tell again."""
        events, metrics = events_path(self._directory, self._mesh.rank), self._directory / METRICS
        with self._unwritten.trying(events):
            forget_steps(events, done)  # spans count steps from 0
        if self._mesh.rank == 0:
            with self._unwritten.trying(metrics):
                lost = forget_steps(metrics, done + 1)
                if lost or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
                    note_restart(self._directory, done, lost)

    def add(self, result: StepResult) -> None:
        if len(self.seconds) == WARM_UP:
            self._recent.clear()  # from now on there is better to choose from
        self._recent.append((result.seconds, result.spans))
        self.seconds.append(result.seconds)
        self._losses.append(result.loss)
        self._peak = max(self._peak, result.peak_bytes)
        self._swap.add(result.swap)
        self._last = result

    def summary(self, rows_per_step: int, tokens_per_row: int) -> dict[str, Any]:
        """Predicted against measured; the same on every rank. ``tokens_per_row``: 1 where rows are not of tokens."""
        plan = self._plan
        measured, predicted_spans = self._typical_spans(), self._predicted_spans()
        spent, planned = seconds_by_term(measured), seconds_by_term(predicted_spans)
        ranks = []
        for rank, found in enumerate(self._mesh.gather_objects((self._peak, self._swap.summary()))):
            peak, swap = found
            stage, replica = plan.locate(rank)
            predicted = plan.prediction.ranks[rank]
            ranks.append(
                {
                    "rank": rank,
                    "stage": stage,
                    "replica": replica,
                    # Of what is measured: an accelerator's context, for one, no allocator sees.
                    "budget_bytes": plan.allocator_bytes(rank),
                    "predicted_peak_bytes": plan.allocator_peak_bytes(rank),
                    "measured_peak_bytes": peak,
                    "offloaded_bytes_per_step": swap["bytes_out_per_step"] if swap else 0.0,
                    "predicted_offloaded_bytes_per_step": predicted.offloaded_bytes,
                    "stall_seconds_per_step": swap["stall_seconds_per_step"] if swap else 0.0,
                    "predicted_stall_seconds_per_step": predicted.stall_seconds,
                    "seconds": spent.get(rank, {}),
                    "predicted_seconds": planned.get(rank, {}),
                    "predicted_memory": _terms(plan, stage),
                    "swap": swap,
                }
            )
        restarts, lost_steps = noted_restarts(self._directory)
        return {
            **self._results(rows_per_step, tokens_per_row),
            "restarts": restarts,
            "lost_steps": lost_steps,
            "refused_hosts": noted_refusals(self._directory),
            "skipped_steps": self._last.skipped_steps if self._last else 0,
            "predicted_step_seconds": plan.prediction.step_seconds,
            "bubble_predicted": plan.prediction.bubble,
            "bubble_measured": bubble_fraction(measured),
            "ranks": ranks,
        }

    def _results(self, rows_per_step: int, tokens_per_row: int) -> dict[str, float | None]:
        """Of this start's steps. One that finds all taken has what the start that took them had no time to say."""
        metrics = self._directory / METRICS
        losses = self._losses or told(metrics, "loss")
        seconds = self.seconds or told(metrics, "step_seconds")
        validated = [] if self._losses else told(metrics, "validation_loss")
        timed = seconds[WARM_UP:] or seconds
        median = statistics.median(timed) if timed else None
        rate = rows_per_step / median if median else None
        return {
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "validation_loss": validated[-1] if validated else self.validation_loss,
            "step_seconds_median": median,
            "rows_per_second": rate,
            "tokens_per_second": rate * tokens_per_row if rate and tokens_per_row > 1 else None,
        }

    def write_occupancy(self, step: int) -> None:
        """What this rank's swap held over ``step``, the last; what an earlier plan left there is not this one's."""
        if self._last is not None:
            with self._unwritten.trying(occupancy_path(self._directory, self._mesh.rank)):
                self._write_occupancy(self._last, step)

    def _write_occupancy(self, last: StepResult, step: int) -> None:
        if not swaps(last.swap):
            occupancy_path(self._directory, self._mesh.rank).unlink(missing_ok=True)
            return
        occupancy = Occupancy(
            rank=self._mesh.rank,
            stage=self._mesh.stage,
            replica=self._mesh.replica,
            step=step,
            limit_bytes=last.swap.limit_bytes,
            samples=tuple(last.swap.samples),
            spans=computed(last.spans),
        )
        occupancy.save(self._directory)

    def write(self, summary: dict[str, Any], *, picture: bool) -> None:
        """What rank 0 leaves of a run; one that was complete already, and is, keeps its summary, and gets what a
        process that was killed has not come to."""
        path, trying = self._directory / "summary.json", self._unwritten.trying
        if self._mesh.rank != 0:
            return
        with trying(self._directory / MEASURED_EVENTS):
            self._write_measured(self._directory / MEASURED_EVENTS)
        if self._recent or not path.exists() or summary["ended"] != COMPLETE:
            with trying(path):
                try:
                    path.write_text(json.dumps(finite(summary), indent=1), encoding="utf-8")
                except OSError:
                    path.unlink(missing_ok=True)  # half of it says nothing
                    raise
        # A picture takes longer than saving did.
        drawn = self._directory / "timeline.png"
        if picture and (self._recent or not drawn.exists()):
            with trying(drawn):
                measured = self._measured or _spans_of(self._directory / MEASURED_EVENTS)
                if measured and (predicted := self._predicted_spans()):
                    timeline_png(predicted, measured, drawn)

    def _write_measured(self, path: Path) -> None:
        """Before the summary: where there is one, there is this."""
        if self._measured or not path.exists():
            path.unlink(missing_ok=True)
            with EventLog(path) as events:
                events.extend(self._measured)

    def _typical_spans(self) -> list[Span]:
        """The spans of all ranks for the recent step of median length, as rank 0 measured it."""
        recent = list(self._recent)
        if not recent:
            return []
        order = sorted(range(len(recent)), key=lambda i: recent[i][0])
        chosen = self._mesh.gather_objects(order[len(order) // 2])[0]
        gathered: Iterable[Any] = self._mesh.gather_objects(recent[int(str(chosen))][1])
        self._measured = [span for spans in gathered for span in spans]
        return self._measured

    def _predicted_spans(self) -> list[Span]:
        """What the plan said of each action; none where there is no such file."""
        path = self._directory / PREDICTED_EVENTS
        return list(read_events(path)) if path.is_file() else []


def _spans_of(path: Path) -> list[Span]:
    """What the start before has measured; none where that cannot be read."""
    try:
        return list(read_events(path))
    except ConfigError:
        return []


def _terms(plan: Plan, stage: int) -> dict[str, int]:
    """Predicted bytes by term of the fullest rank of a stage; none where the plan does not say."""
    found = plan.prediction.stages
    return dict(found[stage].memory) if stage < len(found) else {}

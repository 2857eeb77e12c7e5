"""The record of a run's steps on one rank, and the summary at its end."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from parallax.common.events import EventLog, Span, bubble_fraction, idle_fraction, read_events
from parallax.common.metrics import METRICS
from parallax.errors import ConfigError
from parallax.machine.host import resident_bytes
from parallax.mesh import Mesh
from parallax.model.profiling.clock import queued_seconds
from parallax.plan.plan import Plan
from parallax.plan.profile import Utilization
from parallax.plan.simulation.calibrate import seconds_by_term
from parallax.report import timeline_png
from parallax.report.occupancy import Occupancy, computed, occupancy_path
from parallax.report.swap import SwapRecord, swaps
from parallax.runtime.meters.step import StepResult
from parallax.runtime.metrics.config import VALIDATION
from parallax.train.evaluation import Evaluated
from parallax.train.monitor import Unwritten, finite
from parallax.train.nodes import events_path
from parallax.train.repeats import (
    forget_steps,
    note_restart,
    noted_refusals,
    noted_restarts,
    numbers_of,
)

PREDICTED_EVENTS = "events-predicted.jsonl"
MEASURED_EVENTS = "events-measured.jsonl"  # the spans of all ranks for the step of median length
COMPLETE = "steps"  # the summary's ``ended`` of a run that took all of its steps
WARM_UP = 2  # steps left out of the median: first touches of memory, first connections
RECENT = 25  # steps whose spans are kept, among which is the step of median length


def typical_seconds(seconds: Sequence[float], local_steps: int) -> float:
    """Return the typical duration of a step, in seconds: the median of ``seconds``.

    With ``local_steps``, only the last step of a round exchanges weights. So the result is then the median, over the
    rounds, of the mean duration of a round's steps.
    """
    rounds = len(seconds) // local_steps if local_steps else 0
    if not rounds:
        return statistics.median(seconds)
    last = seconds[len(seconds) - rounds * local_steps :]
    return statistics.median(
        statistics.mean(last[n * local_steps : (n + 1) * local_steps]) for n in range(rounds)
    )


class RunRecord:
    """The steps recorded so far. Rank 0 writes files for all ranks. Failed writes are added to ``unwritten``.
    ``validated``: the names of the validation figures, which are None before the first evaluation."""

    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        directory: Path,
        unwritten: Unwritten,
        validated: Sequence[str],
    ) -> None:
        self._mesh, self._plan, self._directory = mesh, plan, directory
        self._unwritten = unwritten
        # Seconds and spans of steps.
        self._recent: deque[tuple[float, list[Span]]] = deque(maxlen=RECENT)
        self._losses: list[float] = []
        self._swap = SwapRecord()
        self._last: StepResult | None = None
        self._peak = self._process = 0
        self._began = self._ended = time.perf_counter()
        self._measured: list[Span] = []
        self._queued = queued_seconds()  # after the steps of warm-up
        self.seconds: list[float] = []
        self._validated: dict[str, float | None] = dict.fromkeys(validated)

    def begin(self, done: int) -> None:
        """Resume after step ``done``. Records of later steps are removed from the run's files, because these steps are
        repeated."""
        events, metrics = events_path(self._directory, self._mesh.rank), self._directory / METRICS
        self._began = self._ended = time.perf_counter()
        with self._unwritten.trying(events):
            forget_steps(events, done)  # spans count steps from 0
        if self._mesh.rank == 0:
            with self._unwritten.trying(metrics):
                lost = forget_steps(metrics, done + 1)
                if lost or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
                    note_restart(self._directory, done, lost)

    def add(self, result: StepResult) -> None:
        if len(self.seconds) == WARM_UP:
            self._recent.clear()  # the first steps are slower than the rest
            self._queued = queued_seconds()
        self._recent.append((result.seconds, result.spans))
        self.seconds.append(result.seconds)
        self._losses.append(result.loss)
        self._peak = max(self._peak, result.peak_bytes)
        self._process = max(self._process, resident_bytes())
        self._ended = time.perf_counter()
        self._swap.add(result.swap)
        self._last = result

    def evaluated(self, found: Evaluated, name: str) -> None:
        """Store the figures of the held-out set ``name``; "" is the main set."""
        numbers = {"loss": found.loss, **found.metrics} if not name else found.metrics
        of = f"/{name}" if name else ""
        self._validated |= {f"{VALIDATION}{key}{of}": value for key, value in numbers.items()}

    def summary(
        self, rows_per_step: int, tokens_per_row: int, utilization: Utilization
    ) -> dict[str, Any]:
        """Return predicted and measured figures, equal on all ranks. ``tokens_per_row``: 1 if rows are not tokens."""
        plan = self._plan
        measured, predicted_spans = self._typical_spans(), self._predicted_spans()
        spent, planned = seconds_by_term(measured), seconds_by_term(predicted_spans)
        ranks = []
        queued = (queued_seconds() - self._queued) / max(1, len(self.seconds) - WARM_UP)
        mine = self._peak, self._process, self._swap.summary(), max(0.0, queued)
        gathered = self._mesh.all_gather_object(mine)
        for rank, (peak, _, swap, queued) in enumerate(gathered):
            place = plan.coordinate(rank)
            predicted = plan.prediction.ranks[rank]
            ranks.append(
                {
                    "rank": rank,
                    "stage": place.pipeline_rank,
                    "replica": place.replica,
                    # Without memory that the allocator does not see, such as an accelerator's context.
                    "budget_bytes": plan.allocator_bytes(rank),
                    "predicted_peak_bytes": plan.allocator_peak_bytes(rank),
                    "measured_peak_bytes": peak,
                    "offloaded_bytes_per_step": swap["bytes_out_per_step"] if swap else 0.0,
                    "predicted_offloaded_bytes_per_step": predicted.offloaded_bytes,
                    "stall_seconds_per_step": swap["stall_seconds_per_step"] if swap else 0.0,
                    "predicted_stall_seconds_per_step": predicted.stall_seconds,
                    # Its main thread could run, but other processes had all cores.
                    "queued_seconds_per_step": queued,
                    "seconds": spent.get(rank, {}),
                    "predicted_seconds": planned.get(rank, {}),
                    "predicted_memory": _terms(plan, place.pipeline_rank),
                    "swap": swap,
                }
            )
        restarts, lost_steps = noted_restarts(self._directory)
        results = self._results(rows_per_step, tokens_per_row)
        rate = results["rows_per_second"]
        return {
            **results,
            "wall_seconds": self._ended - self._began,
            "peak_bytes": max(peak for peak, *_ in gathered),
            "process_bytes": max(process for _, process, *_ in gathered),
            "mfu": utilization.share(rate, plan.world_size) if rate else None,
            "flops_per_row": utilization.flops_per_row or None,
            "peak_flops": utilization.peak_flops or None,
            "peak_source": utilization.peak_source or None,
            "restarts": restarts,
            "lost_steps": lost_steps,
            "refused_hosts": noted_refusals(self._directory),
            "skipped_steps": self._last.skipped_steps if self._last else 0,
            "predicted_step_seconds": plan.prediction.step_seconds,
            "bubble_predicted": plan.prediction.bubble,
            "bubble_measured": (
                idle_fraction(measured, results["step_seconds_median"] or 0.0)
                if plan.schedule.continues
                else bubble_fraction(measured)
            ),
            "ranks": ranks,
        }

    def _results(self, rows_per_step: int, tokens_per_row: int) -> dict[str, float | None]:
        """Return loss and speed of the steps since this start. If this start took no steps because the run was
        complete, return loss and speed of earlier starts, from ``metrics.jsonl``."""
        metrics = self._directory / METRICS
        losses = self._losses or numbers_of(metrics, "loss")
        seconds = self.seconds or numbers_of(metrics, "step_seconds")
        validated = dict(self._validated)
        for key in validated if not self._losses else ():
            if known := numbers_of(metrics, key):
                validated[key] = known[-1]
        timed = seconds[WARM_UP:] or seconds
        median = typical_seconds(timed, self._plan.local_steps) if timed else None
        rate = rows_per_step / median if median else None
        return {
            "steps_of_start": len(self._losses),
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            **validated,
            "step_seconds_median": median,
            "rows_per_second": rate,
            "tokens_per_second": rate * tokens_per_row if rate and tokens_per_row > 1 else None,
        }

    def write_occupancy(self, step: int) -> None:
        """Write how the memory of the swap manager changed during ``step``, the latest step. If this plan does not
        swap, remove the file with these changes that an earlier plan may have left."""
        if self._last is not None:
            with self._unwritten.trying(occupancy_path(self._directory, self._mesh.rank)):
                self._write_occupancy(self._last, step)

    def _write_occupancy(self, last: StepResult, step: int) -> None:
        if not swaps(last.swap):
            occupancy_path(self._directory, self._mesh.rank).unlink(missing_ok=True)
            return
        occupancy = Occupancy(
            rank=self._mesh.rank,
            stage=self._mesh.pipeline_rank,
            replica=self._mesh.replica,
            step=step,
            limit_bytes=last.swap.limit_bytes,
            samples=tuple(last.swap.samples),
            spans=computed(last.spans),
        )
        occupancy.save(self._directory)

    def write(self, summary: dict[str, Any], *, picture: bool) -> None:
        """On rank 0, write the summary, the measured events and, with ``picture``, a picture of the timeline. If the
        run was already complete, the summary is kept, and only files that a killed process did not write are added."""
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
                    path.unlink(missing_ok=True)  # a part of the file is not valid JSON
                    raise
        drawn = self._directory / "timeline.png"
        if picture and (self._recent or not drawn.exists()):
            with trying(drawn):
                measured = self._measured or _spans_of(self._directory / MEASURED_EVENTS)
                if measured and (predicted := self._predicted_spans()):
                    timeline_png(predicted, measured, drawn)

    def _write_measured(self, path: Path) -> None:
        """Write the measured events to ``path``. Call this method before the summary is written, so that a run with a
        summary always has the events."""
        if self._measured or not path.exists():
            path.unlink(missing_ok=True)
            with EventLog(path) as events:
                events.extend(self._measured)

    def _typical_spans(self) -> list[Span]:
        """Return the spans of all ranks for one recent step: the step with the median duration on rank 0."""
        recent = list(self._recent)
        if not recent:
            return []
        order = sorted(range(len(recent)), key=lambda i: recent[i][0])
        chosen = self._mesh.all_gather_object(order[len(order) // 2])[0]
        gathered: Iterable[Any] = self._mesh.all_gather_object(recent[int(str(chosen))][1])
        self._measured = [span for spans in gathered for span in spans]
        return self._measured

    def _predicted_spans(self) -> list[Span]:
        """Return the predicted span of each action; an empty list if the file with the predictions is missing."""
        path = self._directory / PREDICTED_EVENTS
        return list(read_events(path)) if path.is_file() else []


def _spans_of(path: Path) -> list[Span]:
    """Return the measured spans that an earlier start of the run wrote; an empty list if the file cannot be read."""
    try:
        return list(read_events(path))
    except ConfigError:
        return []


def _terms(plan: Plan, stage: int) -> dict[str, int]:
    """Return the predicted bytes of a stage's fullest rank by category (parameters, activations, …); empty if the plan
    has no prediction."""
    found = plan.prediction.stages
    return dict(found[stage].memory) if stage < len(found) else {}

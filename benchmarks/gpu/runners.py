"""Runs the variants, each in a process of its own with a deadline, by turns, and makes a row of each."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.setup import start_of
from benchmarks.gpu.variants import Spec, Turn, train
from benchmarks.models import Task
from benchmarks.ratios import ratios
from benchmarks.workers import Deadline, WayFailed, Worker, rotated

ENOUGH = 1.5  # times the longest round that must be left for another


class Runner:
    """The worker of a variant and its measurements. ``why``: the reason if it did not run, or stopped."""

    def __init__(self, name: str, task: Task, spec: Spec) -> None:
        self.name, self.spec, self._task = name, spec, task
        self.why: str | None = None
        self.traceback: list[str] = []  # what somebody needs who was not there
        self.static_bytes = self.pageable_bytes = 0
        self.rows = spec.rows
        self.turns: list[float] = []  # seconds of a step, the median of a turn
        self.peaks: list[int] = []  # of each turn
        self.losses: dict[int, float] = {}
        self._worker = self._started()

    @property
    def peak_bytes(self) -> int:
        """The most of all turns."""
        return max(self.peaks, default=0)

    def ready(self, deadline: Deadline) -> None:
        """Wait until the model is made."""
        with self._reasons():
            found = self._worker.ready(deadline.left())
            self.static_bytes, self.pageable_bytes = found["static_bytes"], found["pageable_bytes"]

    def turn(self, steps: int, deadline: Deadline) -> None:
        """Some steps that count."""
        turn: Turn | None = self.ask(deadline, "turn", steps)
        if turn is not None:
            self.losses |= turn.losses
            self.peaks = [*(self.peaks if self.turns else ()), turn.peak_bytes]
            self.turns.append(statistics.median(turn.seconds))

    def warm_up(self, deadline: Deadline, *message: Any) -> None:
        """A turn that does not count, or what ``message`` asks instead; its peak counts until there is another."""
        turn: Turn | None = self.ask(deadline, *(message or ("turn", 1)))
        if turn is not None:
            self.losses |= turn.losses
            self.peaks = [turn.peak_bytes]

    def resize(self, rows: int, deadline: Deadline) -> None:
        """Train with ``rows`` rows from now on."""
        static_bytes: int | None = self.ask(deadline, "resize", rows)
        if static_bytes is not None:
            self.rows, self.static_bytes = rows, static_bytes

    def ask(self, deadline: Deadline, *message: Any) -> Any:
        """The worker's answer; None where there is none."""
        if self.why is None:
            with self._reasons():
                return self._worker.ask(message, deadline.left())
        return None

    def restart(self, deadline: Deadline) -> None:
        """Start a new process after a failure."""
        self.close()
        self.why, self._worker = None, self._started()
        self.ready(deadline)

    def stop(self) -> None:
        """Tell the process to end."""
        self._worker.stop()

    def close(self) -> None:
        """End the process; one that failed is cleaning up, and one that hung is gone already."""
        self._worker.close(patience=5.0)

    def _started(self) -> Worker:
        start = start_of(self.spec.device)
        return Worker(self.name, train, self._task, self.spec, start=start)

    @contextlib.contextmanager
    def _reasons(self) -> Iterator[None]:
        try:
            yield
        except WayFailed as failed:
            self.why, self.traceback = str(failed), getattr(failed, "__notes__", [])


@contextlib.contextmanager
def running(
    task: Task, specs: Mapping[str, Spec], deadline: Deadline
) -> Iterator[dict[str, Runner]]:
    """Workers that start side by side, within half of the time, and end together."""
    with contextlib.ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for name, spec in specs.items():
            runners[name] = Runner(name, task, spec)
            stack.callback(runners[name].close)
        for runner in runners.values():
            stack.callback(runner.stop)
        starting = half(deadline)
        for runner in runners.values():
            runner.ready(starting)
        yield runners


def half(deadline: Deadline) -> Deadline:
    """Return half of the remaining time, as the limit of one variant that may hang."""
    return Deadline(deadline.left() / 2)


def by_turns(
    runners: Sequence[Runner], turns: int, steps: int, deadline: Deadline
) -> Iterator[None]:
    """Turns while there is time for another; all that run have the same number of them, or stopped. Yields after each
    round."""
    alive = [runner for runner in runners if runner.why is None]
    longest = 0.0
    for turn in range(turns):
        if not alive or deadline.left() < ENOUGH * longest:
            return
        start = time.perf_counter()
        for runner in rotated(alive, turn):
            runner.turn(steps, half(deadline))
        longest = max(longest, time.perf_counter() - start)
        alive = [runner for runner in alive if runner.why is None]
        yield


def row(runner: Runner, reference: Runner | None, task: Task) -> dict[str, Any]:
    """Return the row of a variant, with times and losses relative to ``reference`` if that ran."""
    found: dict[str, Any] = {"way": runner.name, "rows": runner.rows, "reason": runner.why}
    if runner.why is not None or not runner.turns:
        why = runner.why or "no time was left for a turn"
        return found | {"reason": why, "traceback": runner.traceback}
    found |= {
        "seconds": runner.turns,
        f"{task.unit}_per_second": task.units(runner.rows) / statistics.median(runner.turns),
        "peak_bytes": runner.peak_bytes,
        "peaks": runner.peaks,
        "over_reference": None,
        "throughput": None,
        **exactness(runner.losses, reference.losses if reference else {}),
    }
    if runner.pageable_bytes:
        found["pageable_bytes"] = runner.pageable_bytes
    pairs = min(len(runner.turns), len(reference.turns)) if reference else 0
    if reference is not None and pairs:
        over = ratios(runner.turns[:pairs], reference.turns[:pairs])
        found |= {"over_reference": over, "throughput": 1 / over["median"]}
    return found


def exactness(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    """Compare the losses of the steps that both have taken."""
    steps = sorted(ours.keys() & theirs.keys())
    differences = [abs(ours[step] - theirs[step]) / max(abs(theirs[step]), 1e-30) for step in steps]
    return {
        "losses_compared": len(steps),
        "losses_equal": bool(steps) and all(ours[step] == theirs[step] for step in steps),
        "first_loss_equal": bool(steps) and ours[steps[0]] == theirs[steps[0]],
        "loss_difference": max(differences, default=None),
    }

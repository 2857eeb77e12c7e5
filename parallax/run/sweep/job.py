"""Run one point (run) of a sweep as a separate process, ``parallax train``, so that points share no memory.

::

    sweep, or a launcher's job ──> parallax train name=SWEEP/POINT ... ──> ranks
          │                            output.log
          └── forwards SIGTERM, Ctrl-C, ...; the run saves and ends
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from parallax.common.lock import PRIVATE, is_locked
from parallax.common.signals import REQUESTS, Stopped, exit_code, handling_requests
from parallax.common.terminal import OURS
from parallax.common.units import format_seconds
from parallax.errors import printable
from parallax.run.prepare import RUNS
from parallax.run.sweep.points import (
    OUTPUT,
    Point,
    PointOutcome,
    PointStatus,
    is_complete,
    outcomes,
    summary_of,
)

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_LONGEST_REASON = 500
_READ = 2**16  # bytes of the end of a log
_STOPPED = {exit_code(number) for number in REQUESTS}


@dataclass
class SweepProgress:
    """Prints which point of a sweep is running, how each finished point has ended, and an estimate of the remaining
    time.

    ``total``    the number of points; 0 if unknown
    ``left``     the number of points that have not ended yet
    ``seconds``  the durations of the points that have ended
    ``quiet``    print nothing, because another process does
    """

    total: int = 0
    left: int = 0
    quiet: bool = False
    seconds: list[float] = field(default_factory=list)

    def begins(self, point: Point, directory: Path) -> None:
        self._print(f"{self._which(point)}: {point.label} ({directory / OUTPUT})")

    def ends(self, outcome: PointOutcome, directory: Path) -> None:
        self.left = max(0, self.left - 1)
        self.seconds.append(outcome.seconds)
        took = f"{outcome.status} after {format_seconds(outcome.seconds)}"
        detail = outcome.reason or _speed(directory)
        expected = ""
        if self.left:
            mean = sum(self.seconds) / len(self.seconds)
            expected = f"; {self.left} left, about {format_seconds(mean * self.left)}"
        self._print(
            f"{self._which(outcome.point)} {took}{f': {detail}' if detail else ''}{expected}"
        )

    def note(self, point: Point, text: str) -> None:
        """Print ``text`` about a point that this command does not run, and no longer count the point as left."""
        self.left = max(0, self.left - 1)
        self._print(f"{self._which(point)} {text}")

    def _which(self, point: Point) -> str:
        return f"point {point.number}{f' of {self.total}' if self.total else ''}"

    def _print(self, text: str) -> None:
        if not self.quiet:
            print(printable(text), flush=True)


def _speed(directory: Path) -> str:
    found = (summary_of(directory) or {}).get("step_seconds_median")
    return f"{format_seconds(found)} per step" if isinstance(found, int | float) else ""


@dataclass(frozen=True)
class PointJob:
    """The job that a launcher calls for each point of ``sweep``, in any process; see
    :data:`parallax.config.multirun.Job`.

    ``alike``    keys that are equal in all points
    ``numbers``  point name → number, for the points that are known before the sweep starts
    ``added``    overrides that add folders of options
    ``process``  the process id of the sweep, which this job stops after a request to end
    """

    sweep: str
    alike: frozenset[str]
    numbers: dict[str, int]
    added: tuple[str, ...]
    process: int
    progress: SweepProgress

    def __call__(self, overrides: list[str]) -> float:
        """Run the point, and return its validation loss: NaN if it does not complete, or if another process trains it
        already."""
        point = self._point(overrides)
        directory = RUNS / self.sweep / point.name
        if is_locked(directory):  # an earlier command's
            self.progress.note(point, "is being trained by another process")
            return math.nan
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        self.progress.begins(point, directory)
        begun = time.monotonic()
        PointOutcome(point, PointStatus.RUNNING).save(directory)
        status, reason, number = self._run(point, directory)
        outcome = PointOutcome(point, status, reason, time.monotonic() - begun)
        outcome.save(directory)
        if number and os.getpid() == self.process:
            raise Stopped(number)
        self.progress.ends(outcome, directory)
        found = (summary_of(directory) or {}).get("validation_loss")
        return float(found) if status is PointStatus.DONE and found is not None else math.nan

    def _point(self, overrides: list[str]) -> Point:
        point = Point.of(0, overrides, self.alike)
        number = self.numbers.get(point.name, 0)
        if not number:  # the sweeper chooses its points one after the other
            found = outcomes(RUNS / self.sweep)
            known = found.get(point.name)
            number = known.point.number if known is not None else len(found) + 1
        return replace(point, number=number)

    def _run(self, point: Point, directory: Path) -> tuple[PointStatus, str, int]:
        """Run the point in a process. Return how the point ended, the reason, and the signal that ended it, or 0."""
        overrides = [*self.added, *point.overrides, f"name={self.sweep}/{point.name}"]
        command = [sys.executable, "-m", "parallax", "train", *overrides]
        with (directory / OUTPUT).open("ab") as log:
            start, signals = log.tell(), _PointSignals()
            with handling_requests(signals):
                try:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C comes from here alone, once
                        preexec_fn=_bind_to_parent(),
                    )
                    signals.process = process
                    code = process.wait()
                except BaseException:  # a launcher raises one to end its job
                    signals.send(signal.SIGTERM)
                    reason = _reason(directory / OUTPUT, start)
                    PointOutcome(point, PointStatus.STOPPED, reason).save(directory)
                    raise
        reason = _reason(directory / OUTPUT, start)
        if code == 0 and is_complete(summary_of(directory)):
            return PointStatus.DONE, "", signals.first
        stopped = signals.first or code in _STOPPED
        return (PointStatus.STOPPED if stopped else PointStatus.FAILED), reason, signals.first


class _PointSignals:
    """A signal handler that forwards every request to end to the process of a point, which then saves and ends. A
    second Ctrl-C ends that process at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.first = 0

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The point's process; None before it has started."""
        return self._process

    @process.setter
    def process(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self.first:
            process.send_signal(self.first)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.first = self.first or number
        if self._process is not None:
            self._process.send_signal(number)

    def send(self, number: int) -> None:
        """Forward signal ``number`` to the process, and wait until it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait()


def _bind_to_parent() -> Callable[[], object] | None:
    """Return a function for the child process to call first; None on systems other than Linux. It makes the kernel send
    SIGTERM to the child when its parent ends, so that the child saves and ends. It also makes the child ignore SIGUSR2,
    which a batch system sends to all processes of a job, because only the launcher handles that signal."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def bind() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGTERM)

    return bind


def _reason(log: Path, start: int) -> str:
    """Return why a run ended: the last message that Parallax printed, otherwise the last line of its output. ``log``:
    the file with the output of the run. ``start``: the byte in this file where the output of the last start begins."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _READ))
        lines = file.read().decode("utf-8", "replace").splitlines()
    ours = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
    reason = (ours or [line.strip() for line in lines if line.strip()] or ["it printed nothing"])[
        -1
    ]
    return printable(
        reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}..."
    )

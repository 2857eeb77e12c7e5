"""Send the figures of a run to one destination, in a separate thread.

A slow or dead destination never delays a step: points (each a step with its figures) wait in a queue of bounded length,
and points that do not fit are dropped and counted. A file in the run directory holds the run's id at the destination
and the last step that was sent, so a resumed run is the same run there::

    sent     1 2 3 4 5 6 7 | killed     the checkpoint is of step 5, so steps 6 and 7 are repeated
    resumed            6 7 8 9          a destination that replaces points drops its own 6 and 7 first;
                                        to any other one, the repeated 6 and 7 are not sent again

Steps that were recorded but not sent before, for example because a server was down, are read from ``metrics.jsonl``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.metrics import METRICS
from parallax.errors import printable
from parallax.train.loggers.destination import Destination, LoggedRun, LoggerModule, Point
from parallax.train.repeats import records_between

MOST_WAITING = 2000  # points in the queue
_MOST_AT_ONCE = 50  # points in one write, the most that a killed process loses
_END_SECONDS = 30.0  # for the waiting points, at the end of a run
_FAILED_SECONDS = 3.0  # the same if the run ends with an error, which must be reported soon
_SECRET_NAMES = re.compile("KEY|TOKEN|PASSWORD|SECRET", re.IGNORECASE)
_SHORTEST_SECRET = 6  # characters; shorter values would hide words of a message


class LogSender:
    """Sends points to the logger ``name``. Only the sending thread uses the destination."""

    def __init__(self, name: str, logger: LoggerModule, run: LoggedRun) -> None:
        self.name, self._logger, self._run = name, logger, run
        self._queue = _Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def send(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue the ``figures`` of ``step``, and return at once."""
        if not self._queue.put((step, dict(figures))):
            self._fail("is too slow, so it gets some of the points only")

    def take_failures(self) -> dict[str, int]:
        """Return a mapping from message to the number of points that were lost, for the failures since the last call of
        this method."""
        with self._lock:
            taken, self._failures = self._failures, {}
        return taken

    def close(self, *, failed: bool) -> None:
        """Send the remaining points and close the destination. This method waits only a limited time for both.
        ``failed``: whether the run ends with an error."""
        self._failed = failed
        self._queue.close()
        seconds = _FAILED_SECONDS if failed else _END_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            lost = self._queue.clear()
            self._fail(f"does not answer within {seconds:g} s", max(1, lost))

    def _fail(self, what: str, points: int = 1) -> None:
        with self._lock:
            text = f"the logger {self.name} {what}"
            self._failures[text] = self._failures.get(text, 0) + points

    def _work(self) -> None:
        try:
            mark = Mark.read(self._run, self.name)
            destination = self._open(mark)
        except Exception as error:  # of any library, which must not end the run
            self._fail(f"cannot be opened: {reason_of(error)}")
            for points in self._queue.batches():
                self._fail(f"cannot be opened: {reason_of(error)}", len(points))
            return
        held = mark.step if destination.held is None else min(mark.step, destination.held)
        mark.step = held = min(held, self._run.done) if destination.replaces else held
        for points in self._unsent(held):
            self._write(destination, mark, points)
        for points in self._queue.batches():
            self._write(destination, mark, [each for each in points if each[0] > held])
        try:
            destination.close(failed=self._failed)
        except Exception as error:
            self._fail(f"cannot be closed: {reason_of(error)}")

    def _open(self, mark: Mark) -> Destination:
        new = mark.begin()
        last = min(mark.step, self._run.done)
        return self._logger.open_run(self._run, mark.id, new=new, last=last)

    def _unsent(self, held: int) -> Iterator[list[Point]]:
        """Yield the recorded points after step ``held`` that an earlier start did not send."""
        if held < self._run.done:
            records = records_between(self._run.directory / METRICS, held, self._run.done)
            yield from _batches((int(each["step"]), figures_of(each)) for each in records)

    def _write(self, destination: Destination, mark: Mark, points: Sequence[Point]) -> None:
        """Write points. If the destination cannot replace points, ``mark`` is saved before they are sent. If the
        process is killed in between, points are lost, but none is sent twice."""
        if not points:
            return
        before, last = mark.step, max(mark.step, points[-1][0])
        try:
            if not destination.replaces:
                mark.save(last)
            destination.write(points)
            if destination.replaces:
                mark.save(last)
        except Exception as error:  # of any library, which must not end the run
            self._fail(f"fails: {reason_of(error)}", len(points))
            with contextlib.suppress(OSError):
                mark.save(before)


class _Queue:
    """A queue of at most ``most`` points, from which points are taken in batches."""

    def __init__(self, most: int) -> None:
        self._most, self._points, self._closed = most, deque[Point](), False
        self._changed = threading.Condition()

    def put(self, point: Point) -> bool:
        """Add a point; return False if the queue is full."""
        with self._changed:
            if len(self._points) >= self._most:
                return False
            self._points.append(point)
            self._changed.notify()
            return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def clear(self) -> int:
        """Remove all points; return their number."""
        with self._changed:
            count = len(self._points)
            self._points.clear()
            return count

    def batches(self) -> Iterator[list[Point]]:
        """Wait for points and yield them in batches, until the queue is closed and empty."""
        while True:
            with self._changed:
                while not self._points and not self._closed:
                    self._changed.wait()
                count = min(len(self._points), _MOST_AT_ONCE)
                taken = [self._points.popleft() for _ in range(count)]
            if not taken:
                return
            yield taken


@dataclass
class Mark:
    """How far a run's figures have been sent to one destination, stored in a file in the run directory. ``id``: the
    run's id there. ``step``: the last step that was sent. ``settings``: a hash of the run's configuration."""

    path: Path
    id: str
    step: int
    settings: str

    @classmethod
    def read(cls, run: LoggedRun, name: str) -> Mark:
        """Return the mark that an earlier start of this run stored. Return an empty mark if there is none, or if the
        run begins again at its first step with other settings, because it is then another run."""
        path = run.directory / "loggers" / f"{name}.json"
        text = json.dumps(run.parameters, sort_keys=True, default=str)
        settings = hashlib.sha256(text.encode()).hexdigest()[:16]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = read_json(path, SMALL_BYTES)
            id, step = str(found["id"]), int(found["step"])
            if re.fullmatch("[0-9a-f]+", id) and (run.done or found["settings"] == settings):
                return cls(path, id, step, settings)
        return cls(path, "", 0, settings)

    def begin(self) -> bool:
        """Give the run an id if it has none, and store it before a server gets it. Return whether the id is new."""
        new = not self.id
        self.id = self.id or secrets.token_hex(4)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.save(self.step)
        return new

    def save(self, step: int) -> None:
        """Store ``step`` as the last step that was sent."""
        self.step = step
        partial = self.path.with_suffix(".partial")
        content = {"id": self.id, "step": step, "settings": self.settings}
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(self.path)


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in ``record``, a record of ``metrics.jsonl``, without its step."""
    return {
        key: float(value)
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, without passwords in addresses and values of secret environment variables."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, OSError) and error.strerror:
        first = error.strerror
    text = re.sub(r"//[^/@\s]+@", "//***@", first)
    for name, value in os.environ.items():
        if _SECRET_NAMES.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return printable(f"{type(error).__name__}: {text}"[:300])


def _batches(points: Iterable[Point]) -> Iterator[list[Point]]:
    batch: list[Point] = []
    for point in points:
        batch.append(point)
        if len(batch) == _MOST_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch

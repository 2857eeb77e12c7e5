"""Curves for TensorBoard, in the run directory's ``tensorboard/``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parallax.common.files import temporary_folder
from parallax.train.loggers.destination import LoggedRun, Point


def load() -> None:
    """Import TensorBoard's writer and use it once, so that its tables are allocated before memory is measured."""
    with temporary_folder() as folder:
        curves = Curves(folder)
        curves.write([(0, {"nothing": 0.0})])
        curves.close(failed=False)


def open_run(run: LoggedRun, id: str, *, new: bool, last: int) -> Curves:
    """Return the curves of ``run``; TensorBoard does not show older points of steps after ``last``."""
    del id, new
    return Curves(run.directory / "tensorboard", last)


class Curves:
    """Scalars in event files. Each start of a run writes an event that makes TensorBoard drop older points of steps
    after ``last``, which the new start repeats."""

    replaces = True

    held = None

    def __init__(self, folder: Path, last: int = 0) -> None:
        # 0.3 s, and torch's own writer takes 1.7 s: only when asked for.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary import Writer
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if not isinstance(threading.excepthook, _ThreadErrors):
            threading.excepthook = _ThreadErrors(threading.excepthook)
        folder.mkdir(parents=True, exist_ok=True)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        starts: Any = EventFileWriter(str(folder), filename_suffix=".start")
        starts.add_event(event_pb2.Event(step=last + 1, session_log=start))
        starts.close()
        self._writer: Any = Writer(str(folder))

    def write(self, points: Sequence[Point]) -> None:
        for step, figures in points:
            for name, number in figures.items():
                self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        del failed
        self._writer.close()


class _ThreadErrors:
    """An excepthook that ignores errors of TensorBoard's thread, because the writer raises them again in the caller."""

    def __init__(self, before: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._before = before

    def __call__(self, found: threading.ExceptHookArgs) -> None:
        if not (
            isinstance(found.exc_value, OSError)
            and type(found.thread).__module__.startswith("tensorboard.")
        ):
            self._before(found)

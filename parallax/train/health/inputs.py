"""The time that a step waits for its rows, which a source makes before the step or on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from parallax.runtime.batch import Rows, RowsOf


class TimedRows(RowsOf):
    """A batch that measures the ``seconds`` in which it returned its rows."""

    def __init__(self, batch: Rows) -> None:
        super().__init__(batch)
        self.seconds = 0.0

    def inputs(self, start: int, stop: int) -> Any:
        return self._timed(self._batch.inputs, start, stop)

    def targets(self, start: int, stop: int) -> Any:
        return self._timed(self._batch.targets, start, stop)

    def _timed(self, read: Callable[[int, int], Any], start: int, stop: int) -> Any:
        begun = time.perf_counter()
        try:
            return read(start, stop)
        finally:
            self.seconds += time.perf_counter() - begun

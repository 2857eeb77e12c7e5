"""The interface through which a training loop reports its phases and learns of requests to end."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol


class Watchdog(Protocol):
    """Watches a training loop from another thread."""

    def stop_requested(self) -> int:
        """Return the number of the signal that requested this rank to end, or 0."""

    def served(self) -> None:
        """Record that everything is saved, so that this rank has met the deadline of a request to end."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which messages of the watchdog call the activity of the main thread ``name``, outside of
        steps."""


class NoWatchdog:
    """A watchdog that does nothing."""

    def stop_requested(self) -> int:
        return 0

    def served(self) -> None:
        """No-op."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        del name
        return contextlib.nullcontext()

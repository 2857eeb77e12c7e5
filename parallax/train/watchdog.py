"""The interface through which a training loop reports its phases and learns of requests to end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
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

    @property
    def outlives(self) -> bool:
        """Whether ranks may continue without one whose process has ended."""

    def outliving(self, lose: Callable[[int], Collection[int]]) -> AbstractContextManager[None]:
        """Return a context in which the end of another rank's process does not end all ranks. Instead, the watchdog of
        rank 0 calls ``lose(rank)``, which returns the ranks without which the others continue; none if all must end.
        The returned ranks are killed. The caller must then call :meth:`end_after_loss`."""

    @property
    def loss(self) -> str:
        """Which rank was lost first, as text, on rank 0; "" if none was."""

    def end_after_loss(self, done: str) -> None:
        """End all ranks with the report of the lost rank, to which ``done`` adds what the others have done since. Does
        not return."""


class NoWatchdog:
    """A watchdog that does nothing."""

    outlives, loss = False, ""

    def stop_requested(self) -> int:
        return 0

    def served(self) -> None:
        """No-op."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        del name
        return contextlib.nullcontext()

    def outliving(self, lose: Callable[[int], Collection[int]]) -> AbstractContextManager[None]:
        del lose
        return contextlib.nullcontext()

    def end_after_loss(self, done: str) -> None:
        """No-op: no loss is outlived."""

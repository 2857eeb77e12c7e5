"""Who watches a training loop from another thread."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol


class Onlooker(Protocol):
    """Who watches a loop from another thread."""

    def asked(self) -> int:
        """The number of the signal that asked this rank to end, or 0."""

    def served(self) -> None:
        """What such a signal asks for is done: everything is saved."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around what this rank does outside of steps."""


class Nobody:
    """No onlooker."""

    def asked(self) -> int:
        return 0

    def served(self) -> None:
        """Nobody waits."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        del name
        return contextlib.nullcontext()

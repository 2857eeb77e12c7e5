"""Repair objects with locks or threads in a forked child process.

A child has the parent's memory but only the thread that forked. If another thread of the parent held a lock, nobody
releases the lock in the child. Objects register here, and their ``after_fork`` runs before any other code of the child.
Code that waits for a thread compares :func:`generation` with its value in the process that started the thread.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """The interface of an object whose ``after_fork`` runs in a forked child."""

    def after_fork(self) -> None:
        """Repair the object in the child process, which has only the thread that forked."""


_ALIVE: weakref.WeakSet[Forked] = weakref.WeakSet()
_generation = 0


def call_after_fork(who: Forked) -> None:
    """Call ``who.after_fork()`` in each forked child, as long as ``who`` is alive."""
    _ALIVE.add(who)


def generation() -> int:
    """Return how many forks lie between this process and the original one: 0 in the original process, 1 in its
    child."""
    return _generation


def _in_child() -> None:
    global _generation  # of the process
    _generation += 1
    for who in list(_ALIVE):
        who.after_fork()


os.register_at_fork(after_in_child=_in_child)

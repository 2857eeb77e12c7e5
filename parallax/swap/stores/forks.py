"""Run callbacks in a forked child, for locks that no thread will release and threads that do not exist there.

A child has the parent's memory and only the thread that forked. An object with a lock or threads registers here,
and its ``after_fork`` runs before any other code of the child. Code that waits for a thread compares
:func:`generation` with that of the process that started the thread.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object whose ``after_fork`` runs in a forked child."""

    def after_fork(self) -> None:
        """Repair the object in the child, which has only the thread that forked."""


_ALIVE: weakref.WeakSet[Forked] = weakref.WeakSet()
_generation = 0


def call_after_fork(who: Forked) -> None:
    """Call ``who.after_fork()`` in each forked child, as long as ``who`` is alive."""
    _ALIVE.add(who)


def generation() -> int:
    """Return the number of forks between the first process and this one."""
    return _generation


def _in_child() -> None:
    global _generation  # of the process
    _generation += 1
    for who in list(_ALIVE):
        who.after_fork()


os.register_at_fork(after_in_child=_in_child)

"""What a forked child does about threads that it has not and locks that nobody will release.

A child has the parent's memory and only the thread that forked. Whoever works with threads or holds a lock says here
what is to be done there, before anything else runs in the child; whoever waits for a thread asks whether it is still in
the process that began it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Somebody who lives on in a child."""

    def forked(self) -> None:
        """Runs in the child, which has one thread."""


_ALIVE: weakref.WeakSet[Forked] = weakref.WeakSet()
_generation = 0


def mind_forks(who: Forked) -> None:
    """From now on ``who`` hears of forks, for as long as it lives."""
    _ALIVE.add(who)


def generation() -> int:
    """How many forks there were between the first process and this one."""
    return _generation


def _in_child() -> None:
    global _generation  # of the process
    _generation += 1
    for who in list(_ALIVE):
        who.forked()


os.register_at_fork(after_in_child=_in_child)

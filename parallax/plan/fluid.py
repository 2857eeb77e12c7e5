"""A small event simulator: coroutines that wait for signals, and work that shares resources fairly.

A resource of capacity c lets c pieces of work run at full speed; n > c of them run at speed c/n each. Time jumps
from one end of work to the next. Coroutines yield the :class:`Signal` that they wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from parallax.errors import DeadlockError

Routine = Generator["Signal", None, None]
Name = Callable[[], str]

_EPSILON = 1e-12


@dataclass(eq=False)
class Signal:
    """Something that happens once."""

    done: bool = False
    waiting: list[Routine] = field(default_factory=list)


@dataclass(eq=False)
class Resource:
    """Something that work shares."""

    capacity: float
    users: int = 0

    @property
    def speed(self) -> float:
        """The speed of each piece of work that uses it now."""
        return min(1.0, self.capacity / self.users)


@dataclass(eq=False)
class _Work:
    remaining: float
    resource: Resource
    end: Signal


class Simulator:
    """Runs coroutines until all have ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[Routine] = deque()
        self._work: list[_Work] = []
        self._blocked: dict[Routine, Name] = {}

    def spawn(self, name: Name, routine: Routine) -> None:
        """Add a coroutine; ``name()``, asked for when nothing moves any more, appears in a deadlock's message."""
        self._ready.append(routine)
        self._blocked[routine] = name

    def work(self, seconds: float, resource: Resource) -> Signal:
        """Begin work that alone would take ``seconds``; the signal is its end."""
        end = Signal()
        if seconds <= 0:
            end.done = True
            return end
        resource.users += 1
        self._work.append(_Work(seconds, resource, end))
        return end

    def set(self, signal: Signal) -> None:
        """Let a signal happen."""
        signal.done = True
        self._ready.extend(signal.waiting)
        signal.waiting.clear()

    def run(self) -> float:
        """Run to the end; the seconds it took. Raises :class:`DeadlockError` when nothing can move any more."""
        while True:
            while self._ready:
                self._advance(self._ready.popleft())
            if not self._work:
                break
            self._jump()
        if self._blocked:
            raise DeadlockError(
                "nothing can move any more: " + "; ".join(sorted(name() for name in self._blocked.values()))
            )
        return self.now

    def _advance(self, routine: Routine) -> None:
        for signal in routine:
            if not signal.done:
                signal.waiting.append(routine)
                return
        del self._blocked[routine]

    def _jump(self) -> None:
        seconds = min(work.remaining / work.resource.speed for work in self._work)
        self.now += seconds
        ended = []
        for work in self._work:
            work.remaining -= seconds * work.resource.speed
            if work.remaining <= _EPSILON:
                ended.append(work)
        self._work = [work for work in self._work if work.remaining > _EPSILON]
        for work in ended:
            work.resource.users -= 1
            self.set(work.end)

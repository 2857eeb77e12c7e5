"""A small event simulator: coroutines that wait for signals, and work that shares resources fairly.

A resource of capacity c runs up to c pieces of work at full speed. If n > c pieces run, each runs at speed c/n. Time
jumps from one end of work to the next. Coroutines yield the :class:`Signal` that they wait for.

All work of a resource advances at one speed. So a resource needs only one clock, which runs at that speed: a piece of
work ends when the clock has advanced by the work's seconds, however often the speed changed (virtual time; Zhang 1990,
"Virtual Clock"; Demers et al. 1989, "Analysis and Simulation of a Fair Queueing Algorithm"). Each resource has a heap
of its ends of work, and the simulator has a heap of the resources' next ends. So an event costs the logarithm of the
number of running pieces of work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from parallax.errors import DeadlockError

Routine = Generator["Signal", None, None]
Name = Callable[[], str]

_EPSILON = 1e-12  # ends closer together than this are one event
_NUMBER = itemgetter(0)
_ALONE = -1  # the number of announcements of work without a resource


@dataclass(eq=False, slots=True)
class Signal:
    """An event that occurs once, and then resumes the coroutines in ``waiting`` and calls ``then``."""

    done: bool = False
    waiting: list[Routine] = field(default_factory=list)
    then: Callable[[], None] | None = None


@dataclass(eq=False, slots=True)
class Transfer(Signal):
    """An operation with a duration. It completes when the clock of its resource reaches ``due``.

    ``factor`` is the operation's speed relative to the speed of the resource.
    """

    due: float = 0.0
    factor: float = 1.0


@dataclass(eq=False, slots=True)
class Resource:
    """A capacity that concurrent work shares.

    ``speeds[k − 1]`` is the speed of each of k pieces of work, if it was measured. ``clock`` is the value of the
    resource's clock at second ``read_at``; since then the clock runs at ``speed``. ``announced`` counts the ends of
    work that were scheduled. Only the last of them is valid, and it assumes ``announced_speed``.
    """

    capacity: float
    speeds: tuple[float, ...] = ()
    users: int = 0
    speed: float = 1.0
    clock: float = 0.0
    read_at: float = 0.0
    announced: int = 0
    announced_speed: float = 0.0
    ends: list[tuple[float, int, Transfer]] = field(default_factory=list)

    def advance(self, now: float, change: int) -> None:
        """Advance the clock to second ``now``, then change the number of running pieces of work by ``change``.

        With more pieces of work than were measured, the total speed is that of the largest measured number.
        """
        self.clock += (now - self.read_at) * self.speed
        self.read_at = now
        self.users += change
        if self.speeds:
            measured = min(max(1, self.users), len(self.speeds))
            self.speed = self.speeds[measured - 1] * measured / max(measured, self.users)
        elif self.users > self.capacity:
            self.speed = self.capacity / self.users
        else:
            self.speed = 1.0
        if not self.users:
            self.clock = 0.0  # small numbers have smaller rounding errors

    def next_end(self) -> float | None:
        """Return the value of the resource's clock at the next end of work; None if no work is running."""
        ends = self.ends
        while ends and (ends[0][2].done or ends[0][2].due != ends[0][0]):
            heappop(ends)
        return ends[0][0] if ends else None


class Simulator:
    """Runs coroutines until all have ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[Routine] = deque()
        self._next: list[tuple[float, int, int, Resource | Transfer]] = []
        self._blocked: dict[Routine, Name] = {}
        self._number = count()

    def spawn(self, name: Name, routine: Routine) -> None:
        """Add a coroutine. ``name()`` returns its name for the message about a deadlock."""
        self._ready.append(routine)
        self._blocked[routine] = name

    def work(self, seconds: float, resource: Resource, factor: float = 1.0) -> Transfer:
        """Start work and return the signal of its end.

        Without other work on ``resource`` it takes ``seconds`` / ``factor``, where ``factor`` is the relative speed of
        the work.
        """
        work = Transfer(factor=factor)
        if seconds <= 0:
            work.done = True
            return work
        resource.advance(self.now, 1)
        self._place(work, seconds, resource)
        # Otherwise the last announcement is still valid.
        if resource.ends[0][2] is work or resource.speed != resource.announced_speed:
            self._announce(resource)
        return work

    def timer(self, seconds: float) -> Transfer:
        work = Transfer(done=seconds <= 0)
        if not work.done:
            heappush(self._next, (self.now + seconds, next(self._number), _ALONE, work))
        return work

    def rescale(self, work: Transfer, resource: Resource, factor: float) -> None:
        """Change the relative speed of ``work``, which runs on ``resource``, to ``factor``."""
        if work.done or work.factor == factor:
            return
        resource.advance(self.now, 0)
        remaining = max(0.0, work.due - resource.clock) * work.factor
        work.factor = factor
        self._place(work, remaining, resource)
        self._announce(resource)

    def set(self, signal: Signal) -> None:
        signal.done = True
        if signal.waiting:
            self._ready.extend(signal.waiting)
            signal.waiting.clear()
        if signal.then is not None:
            signal.then()

    def run(self) -> float:
        """Run until all coroutines have ended, and return the simulated time in seconds.

        Raises :class:`DeadlockError` if all remaining coroutines wait.
        """
        while True:
            while self._ready:
                self._advance(self._ready.popleft())
            if not self._jump():
                break
        if self._blocked:
            raise DeadlockError(
                "nothing can move any more: "
                + "; ".join(sorted(name() for name in self._blocked.values()))
            )
        return self.now

    def _advance(self, routine: Routine) -> None:
        for signal in routine:
            if not signal.done:
                signal.waiting.append(routine)
                return
        del self._blocked[routine]

    def _place(self, work: Transfer, seconds: float, resource: Resource) -> None:
        work.due = resource.clock + seconds / work.factor
        heappush(resource.ends, (work.due, next(self._number), work))

    def _announce(self, resource: Resource) -> None:
        """Schedule the end of the resource's next work. Ends that were scheduled for it earlier become void."""
        resource.announced += 1
        resource.announced_speed = resource.speed
        due = resource.next_end()
        if due is not None:
            at = resource.read_at + max(0.0, due - resource.clock) / resource.speed
            heappush(self._next, (at, next(self._number), resource.announced, resource))

    def _jump(self) -> bool:
        """Advance to the next end of work, and complete all work that ends at this time, in the order of its start.

        Return False if there was no work.
        """
        ended: list[tuple[int, Transfer]] = []
        limit = float("inf")
        upcoming = self._next
        while upcoming and upcoming[0][0] <= limit:
            at, number, announced, owner = heappop(upcoming)
            if isinstance(owner, Resource) and announced != owner.announced:
                continue
            if not ended:
                self.now = max(self.now, at)
                limit = self.now + _EPSILON
            if isinstance(owner, Transfer):
                ended.append((number, owner))
            else:
                self._end(owner, ended)
        ended.sort(key=_NUMBER)
        for _, work in ended:
            self.set(work)
        return bool(ended)

    def _end(self, resource: Resource, ended: list[tuple[int, Transfer]]) -> None:
        """Complete the work of one resource that ends now, and add it to ``ended``."""
        resource.advance(self.now, 0)
        due, users = resource.next_end(), 0
        horizon = max(resource.clock, due or 0.0) + _EPSILON
        while due is not None and due <= horizon:
            _, number, work = heappop(resource.ends)
            work.done = True
            ended.append((number, work))
            users -= 1
            due = resource.next_end()
        resource.advance(self.now, users)
        self._announce(resource)

"""The current activity of this rank, which its watchdog thread reads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from parallax.plan.plan import Coordinate, Plan
from parallax.plan.schedule import Action
from parallax.runtime.failure.life import Life, ThreadLife, waits_for_others
from parallax.runtime.failure.report import RankStatus

_EXAMINE_SECONDS = 1.0  # between two checks for signs of life


class Watched(Protocol):
    """The attributes of an engine that the watchdog thread reads."""

    @property
    def current(self) -> tuple[Action, int, float] | None:
        """The current action, its step, and its start time (time.perf_counter); None between steps. It is the same
        tuple object for the duration of the action."""

    @property
    def completed_steps(self) -> int:
        """Completed steps of the run."""

    @property
    def beside(self) -> Mapping[str, threading.Thread]:
        """The thread of each background activity, by the activity's name."""


@dataclass(slots=True)
class BesideSteps:
    """A background activity of this rank, such as writing a checkpoint. ``what`` is its name, and ``thread`` runs it.
    ``idle_seconds``: the seconds since ``life`` last saw progress of the thread."""

    what: str
    thread: threading.Thread
    life: ThreadLife
    idle_seconds: float = 0.0


class OwnStatus:
    """The current activity of this rank.

    During a step, the activity is the action that the main thread runs. Between steps, it is a named phase, such as
    loading data, with the time since the last sign of progress. ``steps`` holds the indices of the observed steps.
    """

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self._attended: tuple[Watched, Plan] | None = None
        self._phase: tuple[str] = ("",)  # a new object for each phase, even if the name repeats
        self._life = Life()
        self._examined = time.monotonic()
        self._doing: object = None
        self.beside: BesideSteps | None = None
        self._beside_at = time.monotonic()

    def attend(self, engine: Watched, plan: Plan) -> None:
        """From now on, observe ``engine``, which runs ``plan``."""
        self._attended = engine, plan

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context in which the main thread's activity outside of steps is called ``name``.

        ``name`` must complete the sentence "the rank has been …".
        """
        before, self._phase = self._phase, (name,)
        try:
            yield
        finally:
            self._phase = before

    @property
    def current(self) -> tuple[Action, int, float] | None:
        """The action that the engine is running, its step, and its start time (time.perf_counter); None outside of
        steps."""
        return self._attended[0].current if self._attended else None

    def coordinate(self, rank: int) -> Coordinate | None:
        """Return the coordinate of ``rank``; None before there is a plan."""
        return self._attended[1].coordinate(rank) if self._attended else None

    def observe(self, before: RankStatus, now: float, gap: float) -> RankStatus:
        """Return this rank's status at time ``now``. ``before``: the status of the previous observation,
        ``gap`` seconds earlier."""
        current = self.current
        doing = current or self._phase
        gap = gap if doing is self._doing else 0.0
        seconds = before.seconds + gap if doing is self._doing else 0.0
        self._doing = doing
        if current is not None:
            self.steps.add(current[1])
            return RankStatus(current[0], current[1], seconds)
        idle, waits = self._examine(before, now, gap)
        # Steps shorter than an observation interval are not observed.
        done = self._attended[0].completed_steps if self._attended else 0
        return RankStatus(
            None, done or -1, seconds, phase=self._named_phase, idle_seconds=idle, waits=waits
        )

    def observe_beside(self, now: float) -> None:
        """Check whether the engine's background activity, if it has one, makes progress. No-op if the previous check is
        less than a second ago."""
        seconds = now - self._beside_at
        if seconds < _EXAMINE_SECONDS or self._attended is None:
            return
        self._beside_at = now
        what, thread = next(iter(self._attended[0].beside.items()), ("", None))
        if thread is None or thread.native_id is None:
            self.beside = None
        elif self.beside is None or (self.beside.what, self.beside.thread) != (what, thread):
            self.beside = BesideSteps(what, thread, ThreadLife(thread.native_id))
        elif self.beside.life.shows():
            self.beside.idle_seconds = 0.0
        else:
            # Capped, since this process itself may have been stopped.
            self.beside.idle_seconds += min(seconds, 2 * _EXAMINE_SECONDS)

    @property
    def _named_phase(self) -> str:
        """The name of the main thread's phase outside of steps. It is never empty, because a phase without a name could
        hang undetected."""
        return self._phase[0] or ("between steps" if self._attended else "starting")

    def _examine(self, before: RankStatus, now: float, gap: float) -> tuple[float, bool]:
        """Return the seconds without progress outside of steps, and whether this rank waits for other ranks.

        ``before``: the status of the previous observation, ``gap`` seconds before the time ``now``.
        """
        idle = before.idle_seconds + gap if gap else 0.0
        if min(now - self._examined, before.seconds) < _EXAMINE_SECONDS:
            return idle, before.waits and gap > 0
        self._examined = now
        alive, waits = self._life.shows(), waits_for_others()
        return (idle if waits or not alive else 0.0), waits

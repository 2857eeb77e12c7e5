"""Every rank learns at once that another one failed, and one of them says which and why.

Ranks wait for each other in calls of torch and of its backends that know nothing of a peer's end: for the timeout of a
process group, ten minutes and more. So beside the main thread each rank has one that only listens, connected with rank
0's, which judges::

    rank 1    receive_gradient of micro-batch 0, for 61 s ─┐
    rank 2    failed: RuntimeError ...                     ├─> rank 0 ──> report ──> every rank ends
    rank 3    its connection ends ─────────────────────────┘

An exception is told in words; the end of a process, whatever ended it, by the end of its connection; a hang by what the
ranks are doing, which their threads read from the engine. Exactly one rank speaks: the one that failed, or one beside
it where it cannot. Then each thread ends its process, whatever the main thread waits in: nothing of torch interrupts
that (``ProcessGroup.abort`` returns at once and a gloo receive goes on), and nothing has to be put in order, for swap
files have no name and checkpoints appear by renaming.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parallax.common.signals import Requests, exit_code, stopped_by
from parallax.plan.plan import Plan
from parallax.plan.schedule import Action
from parallax.runtime.failure.heartbeat import BeatStatus, Heartbeat
from parallax.runtime.failure.life import where
from parallax.runtime.failure.links import (
    UNREACHABLE_SECONDS,
    Meeting,
    UnreachableError,
    meet,
)
from parallax.runtime.failure.own_status import OwnStatus, Watched
from parallax.runtime.failure.refusal import end
from parallax.runtime.failure.report import (
    FailureKind,
    FailureReport,
    RankStatus,
    complaint,
    name,
    overdue,
    remedy,
    root_cause,
    speaker,
    speaks,
)
from parallax.runtime.failure.waking import WakeUp

PATIENCE_SECONDS = 1.0  # for rank 0's judgement, and for a main thread that has its last words
_BEAT_SECONDS = 0.5  # between two messages of a rank that has nothing new to say
_LOOK_SECONDS = 0.1  # between two looks at the engine
_HEARD_PER_SECOND = 200  # messages that rank 0 can read beside its work
# Without a look: this process itself was stopped, and knows nothing of the others.
_PAUSE_SECONDS = 5.0
# What those that have nothing to say leave the one that has: torchrun stops it with them.
_FOLLOW_SECONDS = 0.2


@dataclass(frozen=True)
class HangLimits:
    """More than ``seconds`` in one action, without an answer, or outside of steps without a sign of life are a hang,
    and so are more than ``phase_seconds`` in one phase; 0 sets no limit. The first ``patient_steps`` steps, which
    compile, take as long as a phase. A rank that is asked to end has ``grace_seconds`` to save. The stacks of a rank
    that hangs are left in ``directory``."""

    seconds: float = 0.0
    phase_seconds: float = 0.0
    grace_seconds: float = 0.0
    patient_steps: int = 0
    directory: Path | None = None

    def after(self, steps: int) -> float:
        """The limit of an action when so many steps have begun."""
        if 0 < steps <= self.patient_steps:
            return max(self.seconds, self.phase_seconds or float("inf"))
        return self.seconds


class Watch:
    """One rank's watch. Made by :meth:`start`, and closed where the run ends in order."""

    def __init__(
        self, met: Meeting, say: Callable[[FailureReport], None], heartbeat: Heartbeat
    ) -> None:
        self.rank, self._met, self._say = met.rank, met, say
        self._heartbeat = heartbeat
        self._links = dict(met.links)
        size = len(met.pids)
        # Slower where there are many.
        self._pace = max(1.0, size / _HEARD_PER_SECOND * _BEAT_SECONDS)
        self._limits, self._own = HangLimits(), OwnStatus()
        self._seen = [RankStatus()] * size
        self._looked, self._told = time.monotonic(), float("-inf")
        self._heard = [self._looked] * size
        self._requests = Requests()
        self._serving = self._served = False
        self._hanging: threading.Thread | None = None  # the main one
        self._leaving = float("inf")
        self._claim: FailureReport | None = None
        self._report: FailureReport | None = None
        self._judged = threading.Event()
        self._speaking = threading.Lock()
        self._closing = False
        self._waking = WakeUp()
        self._selector = selectors.DefaultSelector()
        for peer, link in self._links.items():
            self._selector.register(link.socket, selectors.EVENT_READ, peer)
        self._selector.register(self._waking.socket, selectors.EVENT_READ)
        os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(target=self._run, name="parallax-watch", daemon=True)

    @classmethod
    def start(cls, say: Callable[[FailureReport], None], heartbeat: Heartbeat) -> Watch:
        """Begin to watch. Called by the main thread of every rank, with torch's world initialised where there is one.
        ``say`` is called on the rank that speaks, by any thread; ``heartbeat`` tells the launcher that this rank is
        there."""
        watch = cls(meet(), say, heartbeat)
        watch._thread.start()
        return watch

    def limit(
        self,
        seconds: float,
        phase_seconds: float,
        grace_seconds: float,
        directory: Path | None = None,
    ) -> None:
        """Set what :class:`HangLimits` says."""
        self._limits = replace(
            self._limits,
            seconds=seconds,
            phase_seconds=phase_seconds,
            grace_seconds=grace_seconds,
            directory=directory,
        )

    def attend(self, engine: Watched, plan: Plan, *, patient_steps: int = 0) -> None:
        """Look at ``engine`` from now on. Its first ``patient_steps`` steps, which compile, take as long as a phase."""
        self._own.attend(engine, plan)
        self._limits = replace(self._limits, patient_steps=patient_steps)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What this rank does outside of steps, to go on after "has been"."""
        return self._own.phase(name)

    def serve(self) -> None:
        """From now on requests to end are the caller's to serve, who asks for them with :meth:`asked`. Before that,
        there is nothing to save: they end all ranks."""
        self._serving = True

    def served(self) -> None:
        """Everything is saved: no request to end can be late any more."""
        self._served = True

    def asked(self) -> int:
        """The signal that asked this rank to end; 0 where none has."""
        return self._requests.first

    def failed(self, how: FailureKind, cause: str, code: int) -> FailureReport:
        """The report on this rank, by what it is in the middle of."""
        current = self._own.current
        where = f" in {RankStatus(current[0], current[1])}" if current else ""
        who = self._name(self.rank, current[0] if current else None)
        return FailureReport(self.rank, how, who, f"failed{where}: {cause}", code=code)

    def claim(self, report: FailureReport) -> None:
        """Tell the others, without waiting, that this rank has failed. What is claimed later follows from it."""
        if self._claim is None:
            self._claim = report
            self._waking.rouse()

    def wait(self) -> None:
        """Wait until it is this rank's turn to speak; where another one failed first, the process ends meanwhile."""
        self._judged.wait(PATIENCE_SECONDS)

    def say(self, report: FailureReport) -> None:
        if self._speaking.acquire(blocking=False):
            self._say(report)

    def close(self) -> None:
        """Say goodbye and stop watching."""
        self._closing = True
        self._waking.rouse()
        self._thread.join()
        self._waking.close()
        self._close_links()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            ready = [key.data for key, _ in self._selector.select(_LOOK_SECONDS * self._pace)]
            for peer in ready:
                if peer is not None:
                    self._hear(peer)
            # Last: why peers end comes before the signal that torchrun sends then.
            if None in ready:
                self._heed(self._waking.read())
            self._look()
        for link in self._links.values():
            link.send({"bye": True})

    def _hear(self, peer: int) -> None:
        try:
            for message in self._links[peer].receive():
                self._heard[peer] = time.monotonic()
                if "seen" in message:
                    self._seen[peer] = RankStatus.from_list(message["seen"])
                elif "report" in message:
                    self._decide(FailureReport.from_dict(message["report"]))
                elif "bye" in message:
                    self._part(peer)
                    return
        except (OSError, ValueError) as error:
            self._part(peer)
            seen = self._seen[peer]
            who = self._name(peer, seen.action)
            if isinstance(error, UnreachableError):
                what = f"cannot be reached any more: for {UNREACHABLE_SECONDS:g} s nothing came through to its host"
                remark = f"{seen.last}; the network between is cut, or the host has gone"
                self._decide(FailureReport(peer, FailureKind.CUT, who, what, remark))
            else:
                what = "ended without a word"
                self._decide(FailureReport(peer, FailureKind.LOST, who, what, seen.last))

    def _part(self, peer: int) -> None:
        link = self._links.pop(peer)
        self._selector.unregister(link.socket)
        link.close()

    def _heed(self, signals: Sequence[int]) -> None:
        """What the main thread wants to be looked at, and signals, which it cannot heed while it waits in a call."""
        for number in signals:
            self._requests.add(number)
            if self._claim is None and (self._requests.impatient or not self._serving):
                doing = str(self._seen[self.rank])
                self._claim = FailureReport(
                    self.rank,
                    FailureKind.STOPPED,
                    stopped_by(number),
                    doing,
                    code=exit_code(number),
                )
        if self._claim is None or self._report is not None:
            return
        if self.rank != 0 and 0 in self._links:
            # Comes back, or another one does.
            self._links[0].send({"report": self._claim.to_dict()})
            if self._claim.how in (FailureKind.STOPPED, FailureKind.OVERDUE):
                self._leaving = min(self._leaving, time.monotonic() + PATIENCE_SECONDS)
        else:
            self._decide(self._claim)

    def _look(self) -> None:
        """At the engine, at the clock, and at what the others said last."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > _PAUSE_SECONDS * self._pace:
            self._heard = [now] * len(self._heard)
            gap = 0.0
        before = self._seen[self.rank]
        seen = self._seen[self.rank] = self._own.look(before, now, gap)
        news = self.rank != 0 and (before.action, before.step) != (seen.action, seen.step)
        if now - self._told >= (_LOOK_SECONDS if news else _BEAT_SECONDS) * self._pace:
            self._told = now
            for link in self._links.values():
                link.send({"seen": seen.to_list()})
            limits = self._limits.seconds and self._silent_seconds, self._limits.grace_seconds
            self._heartbeat.beat(BeatStatus(self._name(self.rank, seen.action), seen, *limits))
        if self._late():
            self.claim(self._overdue())
        self._look_beside(now)
        if now > self._leaving and self._claim is not None:
            os._exit(self._claim.code)
        if self._limits.seconds and self._report is None:
            self._judge(now)

    def _look_beside(self, now: float) -> None:
        """At what this rank does beside its steps, which no action shows: it hangs as a phase does."""
        self._own.look_beside(now)
        beside, limit = self._own.beside, self._limits.seconds
        if beside is None or not 0 < limit < beside.idle_seconds:
            return
        self._hanging = beside.thread
        what = f"has been {beside.what} beside its steps, {beside.idle_seconds:.0f} s without a sign of life"
        who, why = self._name(self.rank, None), f"; {remedy(limit, 0.0)}"
        self.claim(FailureReport(self.rank, FailureKind.HANGS, who, what, why))

    def _late(self) -> bool:
        """Whether this rank was asked to end, and has not saved within the time that there is for it."""
        open_request = self._serving and not self._served and self._claim is None
        return open_request and 0 < self._limits.grace_seconds < self._requests.seconds

    def _overdue(self) -> FailureReport:
        seen = self._seen[self.rank]
        what = f"{self._name(self.rank, seen.action)} is still {'in ' if seen.action else ''}{seen}"
        return overdue(self.rank, self._requests.first, self._limits.grace_seconds, what)

    @property
    def _silent_seconds(self) -> float:
        """That a rank may be silent now, where there is a limit."""
        return max(self._limits.after(len(self._own.steps)), 4 * _BEAT_SECONDS * self._pace)

    def _judge(self, now: float) -> None:
        """Rank 0 judges all, the others rank 0, and that only if it does not answer."""
        heard = {self.rank: now} | {peer: self._heard[peer] for peer in self._links}
        seen = [
            replace(each, silent_seconds=now - heard.get(rank, now))
            for rank, each in enumerate(self._seen)
        ]
        found = root_cause(seen, self._silent_seconds, self._limits.phase_seconds)
        if found is None or (self.rank != 0 and found != (0, FailureKind.SILENT)):
            return
        rank, how = found
        what, remark = complaint(seen, rank, how, self._limits.seconds, self._limits.phase_seconds)
        self._decide(FailureReport(rank, how, self._name(rank, seen[rank].action), what, remark))

    def _decide(self, report: FailureReport) -> None:
        """The first report holds. Rank 0 tells it to all; then the process ends."""
        if self._report is not None:
            return
        if self.rank == 0:
            report = replace(
                report, speaker=speaker(report, self._met.hosts, self._present(report))
            )
            for link in self._links.values():
                link.send({"report": report.to_dict()})
        self._report = report
        if report.rank == self.rank:
            self._judged.set()
            if report.how is FailureKind.RAISED:
                time.sleep(PATIENCE_SECONDS)  # the main thread speaks and leaves
            if report.how is FailureKind.HANGS:
                report = self._with_stacks(report)
        if speaks(report, self.rank, self._met.hosts):
            self.say(report)
            silent = report.how is FailureKind.SILENT
            if silent and self._met.hosts[report.rank] == self._met.hosts[self.rank]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._met.pids[report.rank], signal.SIGKILL)  # it heeds nothing else
        else:
            time.sleep(
                _FOLLOW_SECONDS
                + (2 * _BEAT_SECONDS * self._pace if report.how is FailureKind.SILENT else 0.0)
            )
        end(report.code)

    def _present(self, report: FailureReport) -> list[int]:
        """The ranks that are still there, as rank 0 sees it."""
        if report.how is FailureKind.LOST and len(set(self._met.hosts)) > 1:
            time.sleep(_FOLLOW_SECONDS)  # a host that goes takes all of its ranks along
        return [0, *(peer for peer, link in self._links.items() if not link.ended)]

    def _with_stacks(self, report: FailureReport) -> FailureReport:
        """Say where this rank hangs, and leave the stacks of its threads."""
        report = replace(report, remark=f"{report.remark}; it is in {where(self._hanging)}")
        if self._limits.directory is None:
            return report
        path = self._limits.directory / f"stacks-rank{self.rank}.txt"
        with contextlib.suppress(OSError), path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
            return replace(report, remark=f"{report.remark}; its stacks: {path}")
        return report

    def _name(self, rank: int, action: Action | None) -> str:
        node = self._met.names[rank] if len(set(self._met.hosts)) > 1 else ""
        return name(rank, self._own.coordinate(rank), action, node)

    def _forget(self) -> None:
        """A forked child is no rank: it holds no connection that should end with its parent, and minds its signals."""
        if not self._closing:
            self._waking.forget()
            self._close_links()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._selector.close()

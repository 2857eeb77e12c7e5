"""Each rank's watch: a thread that notices at once if another rank fails. Exactly one rank then reports which rank
failed, and why.

Ranks wait for each other in calls of torch and of its backends. These calls notice the end of a peer only after the
timeout of a process group, which is ten minutes or more. So each rank has a thread that only listens. This thread is
connected with the thread of rank 0, which decides::

    rank 1    receive_gradient of micro-batch 0, for 61 s ─┐
    rank 2    failed: RuntimeError ...                     ├─> rank 0 ──> report ──> every rank ends
    rank 3    its connection ends ─────────────────────────┘

A rank sends a message about an exception. A process that ends closes its connection. A hang is found from the ranks'
current actions, which the threads read from the engine. The failed rank prints the report; if it cannot, another rank
does. Then each thread ends its process, because nothing in torch interrupts the call that the main thread may be in
(``ProcessGroup.abort`` returns at once, but a gloo receive continues). No cleanup is needed, because swap files have no
name and checkpoints appear by renaming.

If the process of an asynchronous replica ends, the others need not. Then the report waits until they have saved.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parallax.common.signals import Requests, exit_code, stopped_by
from parallax.plan.plan import Plan
from parallax.plan.schedule import Action
from parallax.runtime.failure.heartbeat import BeatStatus, Heartbeat, LauncherHeartbeat
from parallax.runtime.failure.life import where
from parallax.runtime.failure.links import (
    UNREACHABLE_SECONDS,
    Meeting,
    UnreachableError,
    meet,
)
from parallax.runtime.failure.own_status import OwnStatus, Watched
from parallax.runtime.failure.refusal import end_process
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

PATIENCE_SECONDS = 1.0  # for rank 0's decision, and for a main thread that prints its report
_BEAT_SECONDS = 0.5  # between two messages of a rank without news
_OBSERVE_SECONDS = 0.1  # between two observations of the engine
_HEARD_PER_SECOND = 200  # messages that rank 0 can read in parallel with its work
# After a longer gap this process itself was stopped, and knows nothing of the others.
_PAUSE_SECONDS = 5.0
# Other ranks wait this long for the reporting rank: torchrun stops it when they end.
_FOLLOW_SECONDS = 0.2


@dataclass(frozen=True)
class HangLimits:
    """Time limits after which a rank counts as hanging. A limit of 0 means no limit.

    ``seconds`` limits the time in one action, the time without a message from the rank, and, outside of steps, the time
    without a sign of life. ``phase_seconds`` limits one phase: an activity of the main thread outside of steps, such as
    loading data. ``grace_seconds`` limits saving after a request to end, such as SIGTERM. The first ``patient_steps``
    steps compile, so an action of these steps may last ``phase_seconds``. The stacks of a rank that hangs are written
    to ``directory``.
    """

    seconds: float = 0.0
    phase_seconds: float = 0.0
    grace_seconds: float = 0.0
    patient_steps: int = 0
    directory: Path | None = None

    def after(self, steps: int) -> float:
        """Return the time limit of an action in seconds, given that ``steps`` steps have begun."""
        if 0 < steps <= self.patient_steps:
            return max(self.seconds, self.phase_seconds or float("inf"))
        return self.seconds


class Watch:
    """Runs a thread of one rank. The thread ends the process if any rank fails or hangs. To find hangs, it sends the
    rank's status to the watches of other ranks: rank 0 sends to all, and all others send to rank 0. Create it with
    :meth:`start`, and close it when the run ends normally."""

    def __init__(
        self, met: Meeting, say: Callable[[FailureReport], None], heartbeat: LauncherHeartbeat
    ) -> None:
        self.rank, self._met, self._say = met.rank, met, say
        self._launcher = heartbeat
        self._heartbeats: list[Heartbeat] = [heartbeat]
        self._links = dict(met.links)
        size = len(met.pids)
        # Messages are less frequent in large worlds.
        self._pace = max(1.0, size / _HEARD_PER_SECOND * _BEAT_SECONDS)
        self._limits, self._own = HangLimits(), OwnStatus()
        self._seen = [RankStatus()] * size
        self._observed_at, self._sent_at = time.monotonic(), float("-inf")
        self._heard = [self._observed_at] * size
        self._requests = Requests()
        self._serving = self._served = False
        self._hanging: threading.Thread | None = None  # None: the main thread
        self._exit_at = float("inf")
        self._claim: FailureReport | None = None
        self._report: FailureReport | None = None
        self._lose: Callable[[int], Collection[int]] = _lose_none
        self._outlived: set[int] = set()  # ranks without which the others continue
        self._loss: FailureReport | None = None  # of the first of them
        self._decided = threading.Event()
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
    def start(cls, say: Callable[[FailureReport], None], heartbeat: LauncherHeartbeat) -> Watch:
        """Start to watch. The main thread of every rank calls this method. If torch.distributed is used, it must be
        initialised before.

        ``say`` is called on the rank that prints the report, from any thread. ``heartbeat`` shows the launcher that
        this rank is alive.
        """
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
        """Set the time limits; see :class:`HangLimits`."""
        self._limits = replace(
            self._limits,
            seconds=seconds,
            phase_seconds=phase_seconds,
            grace_seconds=grace_seconds,
            directory=directory,
        )

    def beat_for(self, heartbeat: Heartbeat) -> None:
        """From now on, also send this rank's status to ``heartbeat``, on the watch's thread."""
        self._heartbeats = [*self._heartbeats, heartbeat]

    def attend(self, engine: Watched, plan: Plan, *, patient_steps: int = 0) -> None:
        """Observe ``engine`` from now on. In the first ``patient_steps`` steps, which compile, an action may last
        ``phase_seconds`` (:class:`HangLimits`)."""
        self._own.attend(engine, plan)
        self._limits = replace(self._limits, patient_steps=patient_steps)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the main thread's activity outside of steps is reported as ``name``.

        The name must complete the sentence "the rank has been …".
        """
        return self._own.phase(name)

    def serve(self) -> None:
        """Record that the caller polls :meth:`stop_requested` from now on, and saves before it ends.

        Before this call, a request to end (such as SIGTERM) ends all ranks at once, since there is nothing to save.
        """
        self._serving = True

    def served(self) -> None:
        """Record that everything is saved, so that this rank has met the deadline of a request to end."""
        self._served = True

    def stop_requested(self) -> int:
        """Return the signal that requested this rank to end; 0 if there was none."""
        return self._requests.first

    @property
    def outlives(self) -> bool:
        """Whether ranks may continue without one that has ended: all are on one host, and the launcher can be told."""
        return self._launcher.has_launcher and len(set(self._met.hosts)) == 1

    @contextlib.contextmanager
    def outliving(self, lose: Callable[[int], Collection[int]]) -> Iterator[None]:
        """A context in which the end of another rank's process does not end all ranks. Instead, the watch of rank 0
        calls ``lose(rank)``, which returns the ranks without which the others continue; none if all must end. The
        returned ranks are killed. The caller must then call :meth:`end_after_loss`."""
        self._lose = lose if self.outlives else _lose_none
        try:
            yield
        finally:
            self._lose = _lose_none

    @property
    def loss(self) -> str:
        """Which rank was lost first, as text, on rank 0; "" if none was."""
        return "" if self._loss is None else self._loss.text

    def end_after_loss(self, done: str) -> None:
        """End all ranks with the report of the lost rank, to which ``done`` adds what the others have done since. Does
        not return."""
        if self._loss is not None:
            self.claim(replace(self._loss, remark=f"{self._loss.remark}; {done}"))
        threading.Event().wait()

    def failed(self, how: FailureKind, cause: str, code: int) -> FailureReport:
        """Return the report of a failure of this rank, which names the rank's current action. ``how`` it failed,
        ``cause`` is the reason as text, and ``code`` the exit code of all ranks."""
        current = self._own.current
        where = f" in {RankStatus(current[0], current[1])}" if current else ""
        who = self._name(self.rank, current[0] if current else None)
        return FailureReport(self.rank, how, who, f"failed{where}: {cause}", code=code)

    def claim(self, report: FailureReport) -> None:
        """Send ``report`` to the other ranks, without waiting: this rank has failed. Later claims are ignored as
        consequences of the first."""
        if self._claim is None:
            self._claim = report
            self._waking.rouse()

    def wait(self) -> None:
        """Wait until this rank may print its report. If another rank failed first, the process ends during this
        call."""
        self._decided.wait(PATIENCE_SECONDS)

    def say(self, report: FailureReport) -> None:
        if self._speaking.acquire(blocking=False):
            self._say(report)

    def close(self) -> None:
        """Tell the other ranks that this rank ends normally, and stop watching."""
        self._closing = True
        self._waking.rouse()
        self._thread.join()
        self._waking.close()
        self._close_links()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            ready = [key.data for key, _ in self._selector.select(_OBSERVE_SECONDS * self._pace)]
            for peer in ready:
                if peer is not None:
                    self._hear(peer)
            # Signals come last: torchrun sends one after a peer's end, whose reason must be read first.
            if None in ready:
                self._handle(self._waking.read())
            self._observe()
        for link in self._links.values():
            link.send({"bye": True})

    def _hear(self, peer: int) -> None:
        try:
            for message in self._links[peer].receive():
                self._heard[peer] = time.monotonic()
                if "seen" in message:
                    self._seen[peer] = RankStatus.from_list(message["seen"])
                elif "report" in message:
                    if peer not in self._outlived:
                        self._decide(FailureReport.from_dict(message["report"]))
                elif "bye" in message:
                    self._disconnect(peer)
                    return
        except (OSError, ValueError) as error:
            self._disconnect(peer)
            seen = self._seen[peer]
            who = self._name(peer, seen.action)
            if isinstance(error, UnreachableError):
                what = f"cannot be reached any more: for {UNREACHABLE_SECONDS:g} s nothing came through to its host"
                remark = f"{seen.last}; the network between is partitioned, or the host is down"
                self._decide(FailureReport(peer, FailureKind.PARTITIONED, who, what, remark))
            else:
                what = "ended without a report"
                report = FailureReport(peer, FailureKind.LOST, who, what, seen.last)
                if not self._outlive(report):
                    self._decide(report)

    def _outlive(self, report: FailureReport) -> bool:
        """Return whether the others continue without the rank of ``report``, whose process has ended. The ranks that
        are lost with it are killed."""
        if report.rank in self._outlived:
            return True
        lost = self._lose(report.rank) if self.rank == 0 else ()
        if not lost or not all(map(self._launcher.outlive, lost)):
            return False
        self._outlived |= {*lost}
        self._loss = self._loss or report
        for rank in self._outlived & self._links.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._met.pids[rank], signal.SIGKILL)
        return True

    def _disconnect(self, peer: int) -> None:
        link = self._links.pop(peer)
        self._selector.unregister(link.socket)
        link.close()

    def _handle(self, signals: Sequence[int]) -> None:
        """Handle the main thread's claim, and the ``signals`` that the main thread cannot handle while it waits inside
        a call."""
        for number in signals:
            self._requests.add(number)
            if self._claim is None and (self._requests.impatient or not self._serving):
                doing = f"during {self._seen[self.rank]}"
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
            # Rank 0 sends this report back, or an earlier one.
            self._links[0].send({"report": self._claim.to_dict()})
            if self._claim.how in (FailureKind.STOPPED, FailureKind.OVERDUE):
                self._exit_at = min(self._exit_at, time.monotonic() + PATIENCE_SECONDS)
        else:
            self._decide(self._claim)

    def _observe(self) -> None:
        """Update this rank's status, send it, and check all limits."""
        now = time.monotonic()
        gap, self._observed_at = now - self._observed_at, now
        if gap > _PAUSE_SECONDS * self._pace:
            self._heard = [now] * len(self._heard)
            gap = 0.0
        before = self._seen[self.rank]
        seen = self._seen[self.rank] = self._own.observe(before, now, gap)
        news = self.rank != 0 and (before.action, before.step) != (seen.action, seen.step)
        if now - self._sent_at >= (_OBSERVE_SECONDS if news else _BEAT_SECONDS) * self._pace:
            self._sent_at = now
            for link in self._links.values():
                link.send({"seen": seen.to_list()})
            limits = self._limits.seconds and self._silent_seconds, self._limits.grace_seconds
            beat = BeatStatus(self._name(self.rank, seen.action), seen, *limits)
            for heartbeat in self._heartbeats:
                heartbeat.beat(beat)
        if self._is_overdue():
            self.claim(self._overdue())
        self._check_beside(now)
        if now > self._exit_at and self._claim is not None:
            os._exit(self._claim.code)
        if self._limits.seconds and self._report is None:
            self._find_failure(now)

    def _check_beside(self, now: float) -> None:
        """Report a background activity that shows no sign of life. The rank's current action does not include such
        activities."""
        self._own.observe_beside(now)
        beside, limit = self._own.beside, self._limits.seconds
        if beside is None or not 0 < limit < beside.idle_seconds:
            return
        self._hanging = beside.thread
        what = f"has been {beside.what} beside its steps, {beside.idle_seconds:.0f} s without a sign of life"
        who, why = self._name(self.rank, None), f"; {remedy(limit, 0.0)}"
        self.claim(FailureReport(self.rank, FailureKind.HANGS, who, what, why))

    def _is_overdue(self) -> bool:
        """Return whether this rank was requested to end and has not saved in time."""
        open_request = self._serving and not self._served and self._claim is None
        return open_request and 0 < self._limits.grace_seconds < self._requests.seconds

    def _overdue(self) -> FailureReport:
        seen = self._seen[self.rank]
        what = f"{self._name(self.rank, seen.action)} is still {'in ' if seen.action else ''}{seen}"
        return overdue(self.rank, self._requests.first, self._limits.grace_seconds, what)

    @property
    def _silent_seconds(self) -> float:
        """Return the seconds for which this rank may be silent now; 0 if there is no limit."""
        return max(self._limits.after(len(self._own.steps)), 4 * _BEAT_SECONDS * self._pace)

    def _find_failure(self, now: float) -> None:
        """Look for a failed rank. Rank 0 checks all ranks; each other rank checks whether rank 0 answers."""
        heard = {self.rank: now} | {peer: self._heard[peer] for peer in self._links}
        seen = [
            replace(each, silent_seconds=now - heard.get(rank, now))
            for rank, each in enumerate(self._seen)
        ]
        for rank in self._outlived:
            seen[rank] = seen[self.rank]  # it neither hangs nor makes progress
        found = root_cause(seen, self._silent_seconds, self._limits.phase_seconds)
        if found is None or (self.rank != 0 and found != (0, FailureKind.SILENT)):
            return
        rank, how = found
        what, remark = complaint(seen, rank, how, self._limits.seconds, self._limits.phase_seconds)
        self._decide(FailureReport(rank, how, self._name(rank, seen[rank].action), what, remark))

    def _decide(self, report: FailureReport) -> None:
        """Accept the first report, which rank 0 sends to all ranks. Then end the process."""
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
            self._decided.set()
            if report.how is FailureKind.RAISED:
                time.sleep(PATIENCE_SECONDS)  # the main thread reports and ends the process
            if report.how is FailureKind.HANGS:
                report = self._with_stacks(report)
        if speaks(report, self.rank, self._met.hosts):
            self.say(report)
            silent = report.how is FailureKind.SILENT
            if silent and self._met.hosts[report.rank] == self._met.hosts[self.rank]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(
                        self._met.pids[report.rank], signal.SIGKILL
                    )  # a stopped process handles no other signal
        else:
            time.sleep(
                _FOLLOW_SECONDS
                + (2 * _BEAT_SECONDS * self._pace if report.how is FailureKind.SILENT else 0.0)
            )
        end_process(report.code)

    def _present(self, report: FailureReport) -> list[int]:
        """Return rank 0 and the ranks that are still connected to it. If the process of a rank was lost, first wait a
        moment, because the end of a host ends all of its ranks."""
        if report.how is FailureKind.LOST and len(set(self._met.hosts)) > 1:
            time.sleep(_FOLLOW_SECONDS)  # a host that fails ends all of its ranks
        return [0, *(peer for peer, link in self._links.items() if not link.ended)]

    def _with_stacks(self, report: FailureReport) -> FailureReport:
        """Write the stacks of all threads to a file, and return the report with the line in which this rank hangs."""
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
        """Close the connections and restore the signal handlers in a forked child, which is not a rank."""
        if not self._closing:
            self._waking.forget()
            self._close_links()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._selector.close()


def _lose_none(rank: int) -> Collection[int]:
    """Return no ranks: all ranks are needed."""
    del rank
    return ()

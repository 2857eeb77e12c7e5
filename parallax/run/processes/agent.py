"""Launch a run: start its ranks on this host, forward requests to end, report why they ended, and restart all of them
after a transient failure.

::

    parallax train ── agent ── fork server ──┬── rank 0 ──┐
          │                                  └── rank 1 ──┴── exit report: why the run ended
          └── forwards SIGTERM, Ctrl-C, ...; the ranks save and end
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from parallax.common.files import temporary_folder
from parallax.common.signals import REQUESTS, Requests, Stopped, exit_code, stopped_by
from parallax.errors import ConfigError, printable
from parallax.run.processes.forkserver import ForkServer, ServerLost
from parallax.run.processes.restarts import Failure, Restarts
from parallax.run.sweep.points import is_complete, summary_of
from parallax.runtime.failure.exit_report import EXIT_REPORT, read_exit_report
from parallax.runtime.failure.heartbeat import Heartbeats
from parallax.runtime.failure.report import FailureKind, FailureReport

# Exit codes of ranks that a request ended before they handled it: the signal's, or the shell's form.
_BY_REQUEST = {-number for number in REQUESTS} | {exit_code(number) for number in REQUESTS} - {0}


@dataclass(frozen=True)
class Agent:
    """Starts the ``ranks`` of the run ``name``, prepared in ``directory``, and restarts them at most ``max_restarts``
    times from the newest checkpoint in ``checkpoints``. ``libraries``: modules that are imported before the ranks are
    forked. ``command``: the arguments of each rank, by default those of training. ``again``: a text that tells the user
    how to continue after a failure."""

    name: str
    directory: Path
    ranks: int
    max_restarts: int
    checkpoints: Path
    libraries: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    again: str = ""

    def start(self, environment: Mapping[str, str], forwarder: SignalForwarder) -> int:
        """Start the ranks with ``environment``, wait until they end, and return the exit code. Meanwhile ``forwarder``
        handles requests to end.

        The ranks find each other through a file, so no port is opened that others could reach. A failed rank reports
        the reason itself.
        """
        begun = time.time()
        restarts = Restarts(self.max_restarts, self.directory, self.checkpoints, self.again)
        with temporary_folder() as folder:
            try:
                while (code := self._attempts(environment, forwarder, restarts, folder)) is None:
                    pass
                return code
            except Stopped as stopped:
                if self._has_ended(since=begun):  # the last rank had just ended
                    return 0
                lost = "" if self.again else ": the steps after the last checkpoint are lost"
                what = f"at once{lost}" if forwarder.impatient else ""
                what = what or (f"while it was starting again{lost}" if restarts.counted else "")
                return self._say_stopped(
                    stopped.number,
                    FailureReport(0, FailureKind.STOPPED, "", what) if what else None,
                )

    def _attempts(
        self,
        environment: Mapping[str, str],
        forwarder: SignalForwarder,
        restarts: Restarts,
        folder: Path,
    ) -> int | None:
        """Start the ranks with one fork server, and start them again after each transient failure. Return the exit
        code, or None if the fork server was lost and a new one may continue."""
        with (
            ForkServer(self.directory, environment, self.libraries, self.command) as server,
            forwarder.to(server),
        ):
            while not server.lost:
                report = folder / f"attempt-{restarts.counted}" / "exit-report"
                report.parent.mkdir()
                heartbeats = Heartbeats(report.parent, self.ranks, forwarder)
                try:
                    server.fork([*self._environments(restarts.counted, folder, report)])
                    codes = server.wait(heartbeats.have_stopped, outlived=heartbeats.is_outlived)
                except ServerLost as lost:
                    failure = Failure.of_server(lost.code, heartbeats.report)
                else:
                    reported = heartbeats.report or read_exit_report(report)
                    early = heartbeats.living(rank for rank in codes if not codes[rank])
                    if (code := self._ended(codes, forwarder, reported, early)) is not None:
                        return code
                    failure = Failure.of(codes, reported, early)
                if not _starts_again(failure, restarts, stop_requested=bool(forwarder.first)):
                    return failure.report.code
        return None

    def _environments(self, attempt: int, folder: Path, report: Path) -> Iterator[dict[str, str]]:
        """Yield the environment variables of each rank of the attempt number ``attempt``: those that torchrun sets, the
        file in ``folder`` through which ranks find each other, and the file ``report`` for their exit report."""
        size = str(self.ranks)
        for rank in map(str, range(self.ranks)):
            yield {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "ROLE_RANK": rank,
                "GROUP_RANK": "0",
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size,
                "ROLE_WORLD_SIZE": size,
                "GROUP_WORLD_SIZE": "1",
                "TORCHELASTIC_RUN_ID": self.name,
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
                "TORCHELASTIC_ERROR_FILE": str(report.parent / rank / "error.json"),
                "PARALLAX_RENDEZVOUS": str(folder / "ranks"),
                EXIT_REPORT: str(report),
            }

    def _ended(
        self,
        codes: Mapping[int, int],
        forwarder: SignalForwarder,
        report: FailureReport | None,
        early: Sequence[int],
    ) -> int | None:
        """Return the exit code if the ranks ended normally or on request, otherwise None. ``early``: the ranks that
        ended with exit code 0 before the run was complete."""
        stopped = report is not None and report.how is FailureKind.STOPPED
        ended = {*codes.values()} - {0}
        stop_requested = (
            forwarder.first and report is None and (ended or early) and ended <= _BY_REQUEST
        )
        if stopped or stop_requested:
            return self._say_stopped(forwarder.first, report)
        well = len(codes) == self.ranks and not any(codes.values())
        return 0 if well and not early else None

    def _say_stopped(self, number: int, report: FailureReport | None) -> int:
        """Print how far the run has come after a request to end, and how to continue it. Return the exit code.
        ``number``: the signal that this process received, or 0 if the ranks received a signal, which ``report``
        names."""
        when = "before its end" if self.again else "before the first step"
        report = report or FailureReport(0, FailureKind.STOPPED, "", when)
        if number:
            code = exit_code(number, saved=report.saved)
            report = replace(report, who=stopped_by(number), code=code)
        again = self.again or f"`parallax train name={self.name}` continues"
        print(f"parallax: {printable(report.text)}; {again}", file=sys.stderr)
        return report.code

    def _has_ended(self, since: float) -> bool:
        """Return whether the run has been completed since the time ``since``."""
        path = self.directory / "summary.json"
        try:
            return path.stat().st_mtime >= since and is_complete(summary_of(self.directory))
        except (OSError, ConfigError):
            return False


class SignalForwarder(Requests):
    """Forwards the first request to end, such as SIGTERM or Ctrl-C, to the ranks, which save and end. If there are no
    ranks, or at a second Ctrl-C, it raises :class:`Stopped`. Other later requests have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self._server: ForkServer | None = None

    @contextmanager
    def to(self, server: ForkServer) -> Iterator[None]:
        """A context in which the first signal that requests the end is forwarded, as SIGTERM, to the ranks that
        ``server`` has forked."""
        self._server = server
        try:
            yield
        finally:
            self._server = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        repeated = bool(self.first)
        self.add(number)
        if repeated and not self.impatient:
            return
        server = self._server
        if self.impatient or server is None or not server.has_ranks:
            if server is not None:
                server.kill()
            raise Stopped(number)
        server.signal(signal.SIGTERM)  # whichever signal was received


def _starts_again(failure: Failure, restarts: Restarts, *, stop_requested: bool) -> bool:
    """Print the failure and what happens next; return whether all ranks must restart. ``stop_requested``: whether the
    ranks were requested to end."""
    refused = restarts.refused(failure, stop_requested=stop_requested)
    after = restarts.next() if refused is None else refused
    what = failure.report.text or ("the run failed" if refused is None else "")
    if what:
        text = f"{what}; {after}" if after else what
        print(f"parallax: {printable(text)}", file=sys.stderr, flush=True)
    return refused is None

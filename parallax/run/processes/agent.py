"""The launcher's side of a run: its ranks as processes of this host, requests to end handed on to them, their end
explained, and after a failure that may pass all of them started again.

::

    parallax train ── agent ── fork server ──┬── rank 0 ──┐
          │                                  └── rank 1 ──┴── last words: why the run ended
          └── SIGTERM, Ctrl-C, ... are handed on; the ranks save and end
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

# How ranks end that were asked to before they could watch for it: by the signal, or as a shell says it.
_BY_REQUEST = {-number for number in REQUESTS} | {exit_code(number) for number in REQUESTS} - {0}


@dataclass(frozen=True)
class Agent:
    """Starts the ``ranks`` of the run ``name``, prepared in ``directory``, at most ``max_restarts`` times again from
    the newest checkpoint in ``checkpoints``. They find ``libraries`` imported."""

    name: str
    directory: Path
    ranks: int
    max_restarts: int
    checkpoints: Path
    libraries: tuple[str, ...] = ()

    def start(self, told: Mapping[str, str], relay: Relay) -> int:
        """Start them, with ``told`` in their environment, and wait for their end; the exit code. ``relay`` is what
        heeds requests to end meanwhile.

        The rendezvous is a file, so no port is opened that others could reach. A rank that fails says why itself.
        """
        begun = time.time()
        restarts = Restarts(self.max_restarts, self.directory, self.checkpoints)
        with temporary_folder() as folder:
            try:
                while (code := self._attempts(told, relay, restarts, folder)) is None:
                    pass
                return code
            except Stopped as stopped:
                if self._has_ended(since=begun):  # the last of the ranks had just gone
                    return 0
                lost = "what came after the last checkpoint is lost"
                what = f"at once: {lost}" if relay.impatient else ""
                what = what or (f"while it was starting again: {lost}" if restarts.counted else "")
                return self._say_stopped(
                    stopped.number,
                    FailureReport(0, FailureKind.STOPPED, "", what) if what else None,
                )

    def _attempts(
        self, environment: Mapping[str, str], relay: Relay, restarts: Restarts, folder: Path
    ) -> int | None:
        """Attempts with one fork server, until one ends well or for good: the exit code. None where the server was
        lost, and another one may go on."""
        with ForkServer(self.directory, environment, self.libraries) as server, relay.to(server):
            while not server.lost:
                words = folder / f"attempt-{restarts.counted}" / "last-words"
                words.parent.mkdir()
                heartbeats = Heartbeats(words.parent, self.ranks, relay)
                try:
                    server.fork([*self._environments(restarts.counted, folder, words)])
                    codes = server.wait(heartbeats.have_stopped)
                except ServerLost as lost:
                    failure = Failure.of_server(lost.code, heartbeats.report)
                else:
                    told = heartbeats.report or read_exit_report(words)
                    early = heartbeats.of_living(rank for rank in codes if not codes[rank])
                    if (code := self._ended(codes, relay, told, early)) is not None:
                        return code
                    failure = Failure.of(codes, told, early)
                if not _starts_again(failure, restarts, asked=bool(relay.first)):
                    return failure.report.code
        return None

    def _environments(self, attempt: int, folder: Path, words: Path) -> Iterator[dict[str, str]]:
        """What each rank is told beside ``told``: what torchrun tells its own, and where to meet."""
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
                "TORCHELASTIC_ERROR_FILE": str(words.parent / rank / "error.json"),
                "PARALLAX_RENDEZVOUS": str(folder / "ranks"),
                EXIT_REPORT: str(words),
            }

    def _ended(
        self,
        codes: Mapping[int, int],
        relay: Relay,
        report: FailureReport | None,
        early: Sequence[int],
    ) -> int | None:
        """The exit code of ranks that ended in order, or as they were asked to; None where they failed, or ended
        ``early``."""
        stopped = report is not None and report.how is FailureKind.STOPPED
        ended = {*codes.values()} - {0}
        asked = relay.first and report is None and (ended or early) and ended <= _BY_REQUEST
        if stopped or asked:
            return self._say_stopped(relay.first, report)
        well = len(codes) == self.ranks and not any(codes.values())
        return 0 if well and not early else None

    def _say_stopped(self, number: int, report: FailureReport | None) -> int:
        """Say how far a run came that was asked to end, by signal ``number`` to this process or by one to its ranks,
        which told; the exit code."""
        report = report or FailureReport(0, FailureKind.STOPPED, "", "before the first step")
        if number:
            code = exit_code(number, saved=report.saved)
            report = replace(report, who=stopped_by(number), code=code)
        print(
            f"parallax: {printable(report.text)}; `parallax train name={self.name}` continues",
            file=sys.stderr,
        )
        return report.code

    def _has_ended(self, since: float) -> bool:
        """Whether the ranks have come to the run's end."""
        path = self.directory / "summary.json"
        try:
            return path.stat().st_mtime >= since and is_complete(summary_of(self.directory))
        except (OSError, ConfigError):
            return False


class Relay(Requests):
    """Hands the first request to end on to the ranks, which serve it; where there are none yet, and at the second
    Ctrl-C, there is nothing to wait for. Others that follow change nothing, also when the ranks have saved and gone."""

    def __init__(self) -> None:
        super().__init__()
        self._server: ForkServer | None = None

    @contextmanager
    def to(self, server: ForkServer) -> Iterator[None]:
        """The ranks of ``server``, while inside."""
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
        server.signal(signal.SIGTERM)  # whatever was sent


def _starts_again(failure: Failure, restarts: Restarts, *, asked: bool) -> bool:
    """Say what happened, and what comes next; whether all ranks are to start again, which nobody has ``asked`` to
    end."""
    refused = restarts.refused(failure, asked=asked)
    after = restarts.next() if refused is None else refused
    what = failure.report.text or ("the run failed" if refused is None else "")
    if what:
        text = f"{what}; {after}" if after else what
        print(f"parallax: {printable(text)}", file=sys.stderr, flush=True)
    return refused is None

"""Torch's agent: a run's ranks as processes of this host, requests to end handed on to them, their end explained.

::

    parallax train ── agent ──┬── rank 0 ──┐
          │                   └── rank 1 ──┴── last words: why the run ended
          └── SIGTERM, Ctrl-C, ... are handed on; the ranks save and end
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallax.common.files import temporary_folder
from parallax.common.signals import Requests, Stopped, exit_code, heeding, stopped_by
from parallax.errors import ParallaxError, UserError, printable
from parallax.runtime.failure.exit_report import EXIT_REPORT, read_exit_report
from parallax.runtime.failure.report import FailureKind, FailureReport


@dataclass(frozen=True)
class Agent:
    """Starts the ``ranks`` of the run ``name``, prepared in ``directory``."""

    name: str
    directory: Path
    ranks: int

    def start(self, told: Mapping[str, str]) -> int:
        """Start them, with ``told`` in their environment, and wait for their end; the exit code.

        One host: the rendezvous is a file, so no port is opened that others could reach. A rank that fails says why
        itself; the agent's own account of it is left out.
        """
        with temporary_folder() as folder:
            settings = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=self.ranks,
                run_id=self.name.replace("/", "-"),  # it becomes part of a file's name
                rdzv_backend="c10d",
                rdzv_endpoint=str(folder / "rendezvous"),
                rdzv_configs={"store_type": "file"},
                monitor_interval=0.1,
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
                signals_to_handle="SIGQUIT",  # of torch's own; requests to end are relayed
            )
            words = folder / "last-words"
            own = {"PARALLAX_RENDEZVOUS": str(folder / "ranks"), EXIT_REPORT: str(words)}
            command = ["-m", "parallax", "train", "--run-dir", str(self.directory)]
            relay, begun = Relay(), time.time()
            with _environment({**told, **own}), _no_logging(), heeding(relay):
                try:
                    elastic_launch(settings, sys.executable)(*command)
                except ChildFailedError as failed:
                    ended = {failure.exitcode for failure in failed.failures.values()}
                    if not _was_stopped(read_exit_report(words)) and not (
                        relay.first and ended == {-signal.SIGTERM}
                    ):
                        return _explain(failed, words)
                    return self._say_stopped(relay.first, read_exit_report(words))
                except SignalException as stopped:
                    return self._say_stopped(int(stopped.sigval), read_exit_report(words))
                except Stopped as stopped:
                    if self._has_ended(since=begun):  # the last of the ranks had just gone
                        return 0
                    what = (
                        "at once: what came after the last checkpoint is lost"
                        if relay.impatient
                        else ""
                    )
                    return self._say_stopped(
                        stopped.number,
                        FailureReport(0, FailureKind.STOPPED, "", what) if what else None,
                    )
                report = read_exit_report(words)
                return self._say_stopped(relay.first, report) if _was_stopped(report) else 0

    def _say_stopped(self, number: int, report: FailureReport | None) -> int:
        """Say how far a run came that was asked to end, by signal ``number`` to this process or by one to its ranks,
        which told; the exit code."""
        report = report or FailureReport(0, FailureKind.STOPPED, "", "before the first step")
        if number:
            report = replace(report, who=stopped_by(number), code=exit_code(number))
        print(
            f"parallax: {report.text}; `parallax train name={self.name}` continues",
            file=sys.stderr,
        )
        return report.code

    def _has_ended(self, since: float) -> bool:
        """Whether the ranks have come to the run's end."""
        path = self.directory / "summary.json"
        try:
            return (
                path.stat().st_mtime >= since
                and json.loads(path.read_text(encoding="utf-8"))["ended"] == "steps"
            )
        except (OSError, ValueError, KeyError):
            return False


class Relay(Requests):
    """Hands a request to end on to the ranks, which serve it; where there are none yet, and at the second Ctrl-C, there
    is nothing to wait for."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """A handler of signals."""
        del frame
        repeated = bool(self.first)
        self.add(number)
        ranks = psutil.Process().children()
        for rank in ranks if self.impatient or not repeated else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                # Whatever was sent: a Python that is still importing dies of it without a traceback.
                rank.send_signal(signal.SIGKILL if self.impatient else signal.SIGTERM)
        if self.impatient or not ranks:
            raise Stopped(number)


def _was_stopped(report: FailureReport | None) -> bool:
    return report is not None and report.how is FailureKind.STOPPED


def _explain(failed: ChildFailedError, words: Path) -> int:
    """Say why the run failed, as the ranks told; the exit code. Which signal ended a rank only its parent knows, and
    nobody else knows anything where no other rank was left."""
    ended = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    report = read_exit_report(words)
    killed = {rank: code for rank, code in ended.items() if code < 0 and code != -signal.SIGTERM}
    if killed and (report is None or report.how is FailureKind.LOST):
        rank, code = next(iter(killed.items()))
        if report is not None and report.rank in killed:
            rank, code = report.rank, killed[report.rank]
        hint = " (no memory left?)" if code == -signal.SIGKILL else ""
        what = f"was killed by {signal.Signals(-code).name}{hint}"
        known = (
            report
            if report is not None and report.rank == rank
            else FailureReport(rank, FailureKind.LOST, f"rank {rank}", "")
        )
        report = replace(
            known,
            what=what,
            remark=f"{known.remark}; run again to continue from the last checkpoint",
        )
    if report is not None:
        print(f"parallax: {printable(report.text)}", file=sys.stderr)
        return report.code
    rank, code = next(iter(ended.items()))
    if code == -signal.SIGTERM:
        raise ParallaxError(
            f"rank {rank} was stopped by SIGTERM; run again to continue from the last checkpoint"
        )
    return code if code == UserError.exit_code else 1


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started inside inherit; afterwards all is as before."""
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _no_logging() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)

"""Decide after a failure whether all ranks restart, and explain the decision.

The launcher retries after failures that may be transient: a process killed by the system, a crash, a hang, a disk or a
network that was unavailable. It does not retry failures that would repeat: an error in the program, the input or the
numbers. The type of the error decides whether a failure may be transient
(:func:`~parallax.runtime.failure.exit_report.may_pass`). A failure that repeats at the same step is not transient.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from parallax.common.metrics import METRICS
from parallax.common.signals import REQUESTS
from parallax.errors import UserError
from parallax.runtime.checkpoint import list_checkpoints
from parallax.runtime.failure.report import FailureKind, FailureReport
from parallax.train.repeats import last_step

_FROM_START = "start from the beginning: there is no checkpoint yet"
_BY_THE_SYSTEM = 2  # restarts at the same step after a rank was killed; after other failures one


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one attempt to run all ranks. ``report`` names the rank that failed. ``exit_code`` is the exit
    code of this rank or, if it did not fail with one, of the first rank that did. If it is negative, its absolute value
    is the signal that ended the rank."""

    report: FailureReport
    exit_code: int

    @classmethod
    def of(
        cls, codes: dict[int, int], report: FailureReport | None, early: Collection[int] = ()
    ) -> Failure:
        """Return the failure of an attempt. ``codes``: rank → exit code, in the order in which they ended. ``report``:
        the ranks' own report; None if no rank could write one. ``early``: ranks that ended with exit code 0 before the
        run was complete, for which a restart would not help. If a rank was killed, its exit code takes precedence over
        a report of a lost rank, because only the rank's parent knows the signal."""
        if early and (report is None or report.how is FailureKind.LOST):
            rank = report.rank if report is not None and report.rank in early else next(iter(early))
            return cls(report=_ended_early(rank, report), exit_code=0)
        ended = {rank: code for rank, code in codes.items() if code}
        killed = {
            rank: code for rank, code in ended.items() if code < 0 and code != -signal.SIGTERM
        }
        if killed and (report is None or report.how is FailureKind.LOST):
            rank = (
                report.rank if report is not None and report.rank in killed else next(iter(killed))
            )
            known = report if report is not None and report.rank == rank else None
            return cls(report=_killed(rank, killed[rank], known), exit_code=killed[rank])
        # If no rank has ended by itself, the launcher killed all because they did not answer.
        rank, code = next(iter(ended.items()), (-1, -signal.SIGKILL))
        if report is None:
            exit_code = code if code == UserError.exit_code else 1
            report = FailureReport(
                rank, FailureKind.LOST, f"rank {rank}", _ended(code), code=exit_code
            )
        return cls(report=report, exit_code=ended.get(report.rank, code))

    @classmethod
    def of_server(cls, code: int, report: FailureReport | None) -> Failure:
        """Return the failure of an attempt in which the fork server ended, which ends all ranks. ``code``: the exit
        code of the server. ``report``: the reason, if the launcher killed the server."""
        who = "the process that starts the ranks"
        lost = FailureReport(-1, FailureKind.LOST, who, _ended(code))
        return cls(report=report or lost, exit_code=code)

    @property
    def may_pass(self) -> bool:
        """Whether the next attempt may succeed."""
        stop_requested = self.report.how in (FailureKind.STOPPED, FailureKind.OVERDUE)
        stop_requested = stop_requested or -self.exit_code in REQUESTS
        return (
            self.report.may_pass and not stop_requested and self.report.code != UserError.exit_code
        )

    def same_as(self, other: Failure) -> bool:
        """Return whether both failures are of the same rank and the same kind, with the same exit code."""
        mine, others = (
            (each.report.rank, each.report.how, each.exit_code) for each in (self, other)
        )
        return mine == others


def _killed(rank: int, code: int, known: FailureReport | None) -> FailureReport:
    known = known or FailureReport(rank, FailureKind.LOST, f"rank {rank}", "")
    return replace(known, what=_ended(code))


def _ended_early(rank: int, report: FailureReport | None) -> FailureReport:
    known = report if report is not None and report.rank == rank else None
    known = known or FailureReport(rank, FailureKind.LOST, f"rank {rank}", "")
    what = "ended with exit code 0 before the run's end"
    remark = f"{known.remark}: its code called exit; let it raise, or return"
    return replace(known, what=what, remark=remark, code=1, may_pass=False)


def _ended(code: int) -> str:
    """Return a text that tells how a process ended, for the end of a sentence about the process."""
    if code >= 0:
        return f"ended with exit code {code}"
    if -code in REQUESTS:
        return f"was stopped by {signal.Signals(-code).name}"
    hint = " (no memory left?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


class Restarts:
    """The restarts of the run in ``directory``: at most ``limit``, each from the newest checkpoint in ``checkpoints``.
    ``again``: a text that tells the user how to continue if there is no restart; by default, to continue from these
    checkpoints."""

    def __init__(self, limit: int, directory: Path, checkpoints: Path, again: str = "") -> None:
        self._how = again
        self.limit, self._left = limit, limit
        self._metrics, self._checkpoints = directory / METRICS, checkpoints
        self._before: Failure | None = None
        self._step, self._times = -1, 0

    @property
    def counted(self) -> int:
        return self.limit - self._left

    def refused(self, failure: Failure, *, stop_requested: bool) -> str | None:
        """Record ``failure``. Return None if all ranks must restart, otherwise a message (possibly empty) that tells
        how to continue. ``stop_requested``: whether the ranks were requested to end. Call it once for each failure."""
        step = last_step(self._metrics)
        same = self._before is not None and failure.same_as(self._before) and step == self._step
        self._times = self._times + 1 if same else 0
        self._before, self._step = failure, step
        if stop_requested or not failure.may_pass or not self.limit:
            return self._again() if failure.exit_code < 0 else ""
        if self._times >= (_BY_THE_SYSTEM if failure.exit_code == -signal.SIGKILL else 1):
            same_again = f"the same failure came {self._times + 1} times at the same step"
            return f"{same_again}, so nothing is started again; {self._again()}"
        if not self._left:
            return f"no restart is left (trainer.max_restarts={self.limit}); {self._again()}"
        return None

    def next(self) -> str:
        """Count one more restart; return a message with the checkpoint to resume from and the restarts left."""
        self._left -= 1
        found = list_checkpoints(self._checkpoints)
        where = found[-1].name if found else "the beginning: there is no checkpoint yet"
        return f"starting again from {where} ({self._left} of {self.limit} restarts left)"

    def _again(self) -> str:
        if self._how:
            return self._how
        saved = list_checkpoints(self._checkpoints)
        return f"run again to {'continue from the last checkpoint' if saved else _FROM_START}"

"""The state of a rank that failed or hangs, and the one sentence that reports it.

When one rank stops, all others wait for it, each in another action, so every rank observes a problem. The last known
actions show which rank is the cause: a rank that computes keeps others waiting, never the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from parallax.common.signals import exit_code, stopped_by
from parallax.errors import printable
from parallax.plan.plan import Coordinate
from parallax.plan.schedule import Action, Kind

ALONE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.FETCH})
"""Actions in which a rank waits for no other rank."""

_BEFORE_STEPS = (
    5  # factor of the limit of silence before the first step: loading may hold Python's lock
)


class FailureKind(StrEnum):
    """How a rank failed.

    ``RAISED``       it raised an exception
    ``LOST``         its process ended without a report
    ``PARTITIONED``  its host is unreachable
    ``HANGS``        it stays in one action or one phase
    ``SILENT``       it does not answer
    ``STOPPED``      it was stopped on purpose
    ``OVERDUE``      it was requested to end and could not save in time
    """

    RAISED = "raised"
    LOST = "lost"
    PARTITIONED = "partitioned"
    HANGS = "hangs"
    SILENT = "silent"
    STOPPED = "stopped"
    OVERDUE = "overdue"


_CANNOT_REPORT = (FailureKind.LOST, FailureKind.PARTITIONED, FailureKind.SILENT)
"""Failures that the failed rank cannot report itself."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last known activity of a rank: its action and step, the seconds that it has spent in the action, and the
    seconds since its last message.

    Outside of a step ``action`` is None and ``phase`` names the activity. ``idle_seconds``: the seconds without a sign
    of life. ``waits``: whether the rank waits for other ranks.
    """

    action: Action | None = None
    step: int = -1
    seconds: float = 0.0
    silent_seconds: float = 0.0
    phase: str = ""
    idle_seconds: float = 0.0
    waits: bool = False

    def to_list(self) -> list[Any]:
        """Return the status as plain data, without ``silent_seconds``, which the receiver measures."""
        action = (
            [str(self.action.kind), self.action.stage, self.action.micro] if self.action else None
        )
        return [action, self.step, self.seconds, self.phase, self.idle_seconds, self.waits]

    @classmethod
    def from_list(cls, plain: Sequence[Any]) -> RankStatus:
        """Return the status from the result of :meth:`to_list`."""
        action, step, seconds, phase, idle, waits = plain
        done = Action(Kind(action[0]), int(action[1]), int(action[2])) if action else None
        return cls(done, int(step), seconds, phase=str(phase), idle_seconds=idle, waits=bool(waits))

    @property
    def last(self) -> str:
        """The last known activity of a rank that sends no more messages, as text for the end of a sentence."""
        if self.action is not None:
            return f", last seen in {self}"
        after = f" after step {self.step}" if self.step >= 0 else ""
        return (
            f", last seen{f' {self.phase}' if self.phase else ''}{after}"
            if self.phase or after
            else ""
        )

    def __str__(self) -> str:
        if self.action is None:
            return f"{self.phase or 'outside of a step'}{f', after step {self.step}' if self.step >= 0 else ''}"
        micro = f" of micro-batch {self.action.micro}" if self.action.micro >= 0 else ""
        return f"{self.action.kind}{micro}, step {self.step}"


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why the run ends.

    ``rank``      the rank that failed, and ``how`` it failed
    ``who``       the name of the rank in messages; ``what``: its failure; ``remark``: a remedy
    ``code``      the exit code of all ranks
    ``speaker``   the rank that prints the report if the failed rank cannot; -1: the first rank of each host prints it
    ``may_pass``  whether another attempt may succeed
    ``saved``     whether all progress was saved
    """

    rank: int
    how: FailureKind
    who: str
    what: str
    remark: str = ""
    code: int = 1
    speaker: int = -1
    may_pass: bool = True
    saved: bool = False

    @property
    def text(self) -> str:
        """The report as one sentence; empty if there is nothing to report."""
        return f"{self.who} {self.what}{self.remark}".strip()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> FailureReport:
        """Return the report from the result of :meth:`to_dict`."""
        return cls(**{**plain, "how": FailureKind(plain["how"])})


def name(rank: int, place: Coordinate | None, action: Action | None = None, node: str = "") -> str:
    """Return a rank's name for messages.

    ``place`` is the rank's coordinate; None before there is a plan. ``action`` selects the stage that is named, because
    a rank may have several stages. ``node`` is the rank's node, or "" if there is only one node.
    """
    on = f" on {printable(node)}" if node else ""
    if place is None:
        return f"rank {rank}{on}"
    stage = place.pipeline_rank if action is None else action.stage
    return f"rank {rank} (stage {stage}, replica {place.replica}){on}"


def speaker(report: FailureReport, hosts: Sequence[str], present: Sequence[int]) -> int:
    """Return the rank that prints ``report``: the failed rank if it still can. ``hosts`` holds the host of each rank.

    Otherwise the result is another rank among the ``present`` ranks: the first on the host of the failed rank or, if
    there is none, the first of all. The result is -1, which means the first rank of each host, if hosts cannot reach
    each other.
    """
    if report.how not in _CANNOT_REPORT:
        return report.rank
    if report.how is FailureKind.PARTITIONED:
        return -1
    return min(
        (rank for rank in present if rank != report.rank),
        key=lambda rank: (hosts[rank] != hosts[report.rank], rank),
        default=-1,
    )


def speaks(report: FailureReport, rank: int, hosts: Sequence[str]) -> bool:
    """Return whether ``rank`` prints ``report``. ``hosts`` holds the host of each rank.

    If rank 0 has ended or if hosts cannot reach each other, no rank could be chosen by :func:`speaker`. Then the first
    rank of each host prints the report, without the failed rank.
    """
    if report.how not in _CANNOT_REPORT:
        return report.rank == rank
    if report.speaker >= 0:
        return report.speaker == rank
    beside = [r for r, host in enumerate(hosts) if host == hosts[rank] and r != report.rank]
    return rank == beside[0]


def root_cause(
    seen: Sequence[RankStatus], limit_seconds: float, phase_seconds: float = 0.0
) -> tuple[int, FailureKind] | None:
    """Return the rank that keeps the others from making progress, and how it failed; None while any rank makes
    progress.

    ``seen`` holds the status of each rank. ``limit_seconds`` limits silence, actions, and the time without a sign of
    life. A silent rank explains all other waits, so silent ranks are considered first. Then come ranks that have
    computed for longer than the limit. Waiting alone is no failure: in a deep pipeline a rank may wait longer than any
    action lasts. Waiting counts only if all ranks have stayed in their actions for longer than the limit. Then the
    cause is a rank that is not within a step while others are or, if all are within a step, the rank with the least
    progress.

    Outside of steps a phase may last any time. A rank is the cause if no rank shows a sign of life, or if its phase has
    lasted longer than ``phase_seconds`` (0: no limit). Ranks that wait for others are considered only if all ranks
    wait.
    """
    ranks = range(len(seen))
    silent = [
        r
        for r in ranks
        if seen[r].silent_seconds > limit_seconds * (1 if seen[r].step >= 0 else _BEFORE_STEPS)
    ]
    if silent:
        return max(silent, key=lambda r: seen[r].silent_seconds), FailureKind.SILENT
    still = [r for r in ranks if seen[r].seconds > limit_seconds]
    alone = [r for r in still if (action := seen[r].action) and action.kind in ALONE]
    if alone:
        return max(alone, key=lambda r: seen[r].seconds), FailureKind.HANGS
    inside = [r for r in ranks if seen[r].action]
    if not inside:
        return _root_cause_outside(seen, limit_seconds, phase_seconds)
    if len(still) < len(seen):
        return None
    if len(inside) < len(seen):
        return max(
            (r for r in still if not seen[r].action), key=lambda r: seen[r].seconds
        ), FailureKind.HANGS
    return min(inside, key=lambda r: (seen[r].step, -seen[r].seconds)), FailureKind.HANGS


def _root_cause_outside(
    seen: Sequence[RankStatus], limit_seconds: float, phase_seconds: float
) -> tuple[int, FailureKind] | None:
    idle = all(each.phase and min(each.idle_seconds, each.seconds) > limit_seconds for each in seen)
    late = [
        r
        for r, each in enumerate(seen)
        if phase_seconds and each.phase and each.seconds > phase_seconds
    ]
    found = [r for r in (range(len(seen)) if idle else late) if not seen[r].waits]
    if found:
        return max(found, key=lambda r: seen[r].seconds), FailureKind.HANGS
    if not idle:
        return None
    # All ranks wait: the one with the least progress is the cause.
    return max(range(len(seen)), key=lambda r: seen[r].seconds), FailureKind.HANGS


def complaint(
    seen: Sequence[RankStatus],
    rank: int,
    how: FailureKind,
    limit_seconds: float,
    phase_seconds: float = 0.0,
) -> tuple[str, str]:
    """Return ``what`` and ``remark`` of a :class:`FailureReport` on the failure ``how`` of ``rank``.

    The texts also name one other rank that waits, and the exceeded limit. ``seen`` holds the status of each rank, and
    the limits are those of :func:`root_cause`.
    """
    found = seen[rank]
    waiting = [
        f"rank {r} waits in {each}" for r, each in enumerate(seen) if r != rank and each.action
    ]
    waiting += [
        f"rank {r} waits, {each}" for r, each in enumerate(seen) if r != rank and each.waits
    ]
    late = not found.action and bool(phase_seconds) and found.seconds > phase_seconds
    remark = f"{f' while {waiting[0]}' if waiting else ''}; {remedy(limit_seconds, phase_seconds if late else 0.0)}"
    if how is FailureKind.SILENT:
        what = f"has not answered for {found.silent_seconds:.0f} s (stopped, or its host is gone){found.last}"
        return what, remark
    where = f"in {found}" if found.action else str(found)
    still = ", without a sign of life" if found.phase and not late and not found.waits else ""
    return f"has been {where}, for {found.seconds:.0f} s{still}", remark


def overdue(rank: int, number: int, grace_seconds: float, what: str) -> FailureReport:
    """Return the report of a rank that was requested to end by signal ``number`` and has not saved in time.

    The rank had ``grace_seconds`` to save. ``what`` is its activity.
    """
    return FailureReport(
        rank,
        FailureKind.OVERDUE,
        f"{stopped_by(number)}, but nothing could be saved within {grace_seconds:g} s (trainer.grace_seconds):",
        what,
        "; the steps after the last checkpoint are lost, the same run continues from there",
        exit_code(number) or 1,
    )


def remedy(limit_seconds: float, phase_seconds: float) -> str:
    """Return a text that names the exceeded limit and the setting that changes it. The limit is ``phase_seconds``, or
    ``limit_seconds`` if ``phase_seconds`` is 0."""
    if phase_seconds:
        return f"the limit is {phase_seconds:g} s (trainer.phase_seconds; 0 sets none)"
    return f"the limit is {limit_seconds:g} s (trainer.watchdog_seconds; 0 sets none)"

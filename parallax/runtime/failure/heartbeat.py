"""Where all ranks stand still at once, or end before their time, none of them can say so: their launcher does.

Ranks watch each other. But of ranks that are all stopped none watches, and a process that is the only rank, or that a
call of ``os._exit(0)`` has ended, leaves nobody who knows. So the launcher makes a file for each rank, into which the
rank's watch writes what it is doing, a few times a second, and which the rank removes where it ends in order::

    rank 0 ── watch ── beat ──> heartbeat-0 ──┐
    rank 1 ── watch ── beat ──> heartbeat-1 ──┴── launcher: none has changed for longer than the limit

Of a rank whose file cannot be written or read nothing is concluded, but that it has not ended while the file is there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.signals import Requests
from parallax.runtime.failure.report import (
    FailureKind,
    FailureReport,
    RankStatus,
    overdue,
    remedy,
    root_cause,
)

# Of a file, all of them each time: a disk that fills up later takes none of them away.
_BYTES = 4096
_LOOK_SECONDS = 1.0  # between two looks at the files
# Without a look: the launcher itself was stopped, most likely with its ranks.
_PAUSE_SECONDS = 15.0
_SLACK_SECONDS = 5.0  # more than ranks need to judge each other


class Heartbeat(Protocol):
    """A rank's side: ``beat`` is called by the thread of its watch, ``end`` by the main one."""

    def beat(self, status: BeatStatus) -> None:
        """The rank is there."""

    def end(self) -> None:
        """The rank has come to its end, in order."""


@dataclass(frozen=True, slots=True)
class BeatStatus:
    """What a rank tells of itself: its ``name``, what it does, for how many seconds it may be silent (0: for ever), and
    within how many it must have saved where it is asked to end (0: no limit)."""

    name: str
    seen: RankStatus
    limit_seconds: float
    grace_seconds: float


class NoHeartbeat:
    """Of a rank whose launcher is not ours."""

    def beat(self, status: BeatStatus) -> None:
        """Nobody reads it."""

    def end(self) -> None:
        """Nobody reads it."""


class FileHeartbeat:
    """In the file of ``rank`` in ``folder``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._count = _file(folder, rank), itertools.count()
        self._handle: int | None = None
        with contextlib.suppress(OSError):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)

    def beat(self, status: BeatStatus) -> None:
        """Write it in place of the last."""
        if self._handle is None:
            return
        seen, limits = status.seen.to_list(), (status.limit_seconds, status.grace_seconds)
        text = json.dumps([next(self._count), status.name, seen, *limits])
        try:
            os.pwrite(self._handle, text.encode().ljust(_BYTES)[:_BYTES], 0)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)  # what is old would be taken for silence

    def end(self) -> None:
        """Remove it, which even a full disk has room for."""
        self._path.unlink(missing_ok=True)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _file(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank}"


@dataclass(slots=True)
class _Heard:
    """What was last read of a rank, as it was written and as it is meant, and the seconds since it has changed."""

    text: list[object] = field(default_factory=list)
    status: BeatStatus | None = None
    silent_seconds: float = 0.0


class Heartbeats:
    """The launcher's side: the files of so many ``ranks`` in ``folder``, which it makes before there are ranks.
    ``requests``: those to end so far."""

    def __init__(self, folder: Path, ranks: int, requests: Requests) -> None:
        self._folder, self._requests = folder, requests
        self._heard = [_Heard() for _ in range(ranks)]
        self._looked = time.monotonic()
        self.report: FailureReport | None = None
        """Why they are to be killed, once they are."""
        for rank in range(ranks):
            with contextlib.suppress(OSError):
                _file(folder, rank).touch()

    def of_living(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that have not ended in order."""
        return [rank for rank in ranks if _file(self._folder, rank).exists()]

    def have_stopped(self) -> bool:
        """Whether the ranks are to be killed, as none of them answers: for longer than any may be silent, or where they
        were asked to end, for so long that nothing will be saved in time. To be called often."""
        gap = time.monotonic() - self._looked
        if gap >= _LOOK_SECONDS:
            self._looked += gap
            self._look(gap if gap < _PAUSE_SECONDS else 0.0)
            self.report = self._judge()
        return self.report is not None

    def _judge(self) -> FailureReport | None:
        living = self.of_living(range(len(self._heard)))
        known = [
            (rank, status, replace(status.seen, silent_seconds=self._heard[rank].silent_seconds))
            for rank in living
            if (status := self._heard[rank].status) is not None
        ]
        if not known or len(known) < len(living):
            return None
        rank, status, seen = max(known, key=lambda each: each[2].silent_seconds)
        others = ", nor has any other rank" if len(known) > 1 else ""
        what = f"has not answered for {seen.silent_seconds:.0f} s{others} (stopped?){seen.last}"
        least, grace = min(each.silent_seconds for _, _, each in known), status.grace_seconds
        if least > _SLACK_SECONDS and 0 < grace < self._requests.seconds - _SLACK_SECONDS:
            return overdue(rank, self._requests.first, grace, f"{status.name} {what}")
        if all(_silent(each, status.limit_seconds) for _, status, each in known):
            remark = f"; {remedy(status.limit_seconds, 0.0)}"
            return FailureReport(rank, FailureKind.SILENT, status.name, what, remark)
        return None

    def _look(self, gap: float) -> None:
        """Read the files, ``gap`` seconds after the last look."""
        for rank, heard in enumerate(self._heard):
            heard.silent_seconds += gap
            try:
                text = read_json(_file(self._folder, rank), SMALL_BYTES)
                _, name, seen, limit, grace = text
                status = BeatStatus(str(name), RankStatus.from_list(seen), limit, grace)
            except (OSError, ValueError, TypeError):
                heard.silent_seconds = 0.0  # there is none, or it is being written
                continue
            if text != heard.text:
                heard.text, heard.status, heard.silent_seconds = text, status, 0.0


def _silent(seen: RankStatus, limit_seconds: float) -> bool:
    """For longer than it may be, where it may not be for ever."""
    sooner = replace(seen, silent_seconds=seen.silent_seconds - _SLACK_SECONDS)
    found = root_cause([sooner], limit_seconds) if limit_seconds else None
    return found is not None and found[1] is FailureKind.SILENT

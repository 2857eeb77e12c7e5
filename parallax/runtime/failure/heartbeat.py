"""Heartbeats of ranks, which show the launcher that all ranks hang or that a rank ended early.

Ranks watch each other, but no rank can report that all ranks are stopped, or that a single rank called ``os._exit(0)``.
So the launcher creates a file for each rank. The rank's watch writes the rank's status there a few times a second, and
the rank removes the file when it ends normally::

    rank 0 ── watch ── beat ──> heartbeat-0 ──┐
    rank 1 ── watch ── beat ──> heartbeat-1 ──┴── launcher: none has changed for longer than the limit

If a rank's file cannot be written or read, the launcher only knows that the rank has not ended while the file exists.
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

# Size of a file, written in full each time, so that a disk that fills up later does not matter.
_BYTES = 4096
_READ_SECONDS = 1.0  # between two readings of the files
# After a longer gap the launcher itself was stopped, most likely with its ranks.
_PAUSE_SECONDS = 15.0
_SLACK_SECONDS = 5.0  # longer than ranks need to find each other's failures


class Heartbeat(Protocol):
    """A rank's side of the heartbeat. The watch's thread calls ``beat``, and the main thread calls ``end``."""

    def beat(self, status: BeatStatus) -> None:
        """Show the launcher that the rank is alive, and its ``status``."""

    def end(self) -> None:
        """Record that the rank ended normally."""


class LauncherHeartbeat(Heartbeat, Protocol):
    """A heartbeat for the launcher, which ends all ranks if one ends, unless this rank tells it not to.
    ``has_launcher``: whether the launcher can be told."""

    has_launcher: bool

    def outlive(self, rank: int) -> bool:
        """Tell the launcher that the other ranks continue without ``rank``, whose process has ended. Return False if it
        cannot be told."""


@dataclass(frozen=True, slots=True)
class BeatStatus:
    """The status of a rank. ``name`` is the rank's name in messages, and ``seen`` its current activity.

    ``limit_seconds``: how long the rank may be silent. ``grace_seconds``: how long it may take to save after a request
    to end, such as SIGTERM. 0 is no limit.
    """

    name: str
    seen: RankStatus
    limit_seconds: float
    grace_seconds: float


class NoHeartbeat:
    """Does nothing, for a rank that Parallax's launcher did not start."""

    has_launcher = False

    def outlive(self, rank: int) -> bool:
        """Return False: no launcher reads it."""
        del rank
        return False

    def beat(self, status: BeatStatus) -> None:
        """No-op."""

    def end(self) -> None:
        """No-op."""


class FileHeartbeat:
    """Writes the status of ``rank`` to its file in ``folder``."""

    has_launcher = True

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._path, self._count = folder, _file(folder, rank), itertools.count()
        self._handle: int | None = None
        with contextlib.suppress(OSError):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)

    def beat(self, status: BeatStatus) -> None:
        """Overwrite the previous status in the rank's file with ``status``."""
        if self._handle is None:
            return
        seen, limits = status.seen.to_list(), (status.limit_seconds, status.grace_seconds)
        text = json.dumps([next(self._count), status.name, seen, *limits])
        try:
            os.pwrite(self._handle, text.encode().ljust(_BYTES)[:_BYTES], 0)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)  # an old status would count as silence

    def outlive(self, rank: int) -> bool:
        try:
            _outlived_file(self._folder, rank).touch()
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Remove the file. Unlike writing, this also works on a full disk."""
        self._path.unlink(missing_ok=True)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _file(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank}"


def _outlived_file(folder: Path, rank: int) -> Path:
    return folder / f"outlived-{rank}"


@dataclass(slots=True)
class _Heard:
    """The last content of a rank's heartbeat file (``text``), the ``status`` that was read from it, and the seconds
    since the content changed."""

    text: list[object] = field(default_factory=list)
    status: BeatStatus | None = None
    silent_seconds: float = 0.0


class Heartbeats:
    """The launcher's side: the heartbeat files of ``ranks`` ranks in ``folder``, created before the ranks start.
    ``requests`` records the requests to end."""

    def __init__(self, folder: Path, ranks: int, requests: Requests) -> None:
        self._folder, self._requests = folder, requests
        self._heard = [_Heard() for _ in range(ranks)]
        self._read_at = time.monotonic()
        self.report: FailureReport | None = None
        """Why the ranks must be killed; None if they need not be."""
        for rank in range(ranks):
            with contextlib.suppress(OSError):
                _file(folder, rank).touch()

    def living(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` whose heartbeat file exists. A rank removes its file when it ends normally."""
        return [rank for rank in ranks if _file(self._folder, rank).exists()]

    def is_outlived(self, rank: int) -> bool:
        """Return whether the other ranks continue without ``rank``, whose process has ended."""
        return _outlived_file(self._folder, rank).exists()

    def have_stopped(self) -> bool:
        """Return whether the launcher must kill the ranks, because no rank responds. Call this several times a second.

        A rank does not respond if it has been silent for longer than its limit, or if it cannot save in time after a
        request to end.
        """
        gap = time.monotonic() - self._read_at
        if gap >= _READ_SECONDS:
            self._read_at += gap
            self._read(gap if gap < _PAUSE_SECONDS else 0.0)
            self.report = self._find_failure()
        return self.report is not None

    def _find_failure(self) -> FailureReport | None:
        alive = self.living(range(len(self._heard)))
        known = [
            (rank, status, replace(status.seen, silent_seconds=self._heard[rank].silent_seconds))
            for rank in alive
            if (status := self._heard[rank].status) is not None
        ]
        if not known or len(known) < len(alive):
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

    def _read(self, gap: float) -> None:
        """Read the heartbeat files of all ranks, ``gap`` seconds after this method last read them."""
        for rank, heard in enumerate(self._heard):
            heard.silent_seconds += gap
            try:
                text = read_json(_file(self._folder, rank), SMALL_BYTES)
                _, name, seen, limit, grace = text
                status = BeatStatus(str(name), RankStatus.from_list(seen), limit, grace)
            except (OSError, ValueError, TypeError):
                heard.silent_seconds = 0.0  # the file does not exist, or is being written
                continue
            if text != heard.text:
                heard.text, heard.status, heard.silent_seconds = text, status, 0.0


def _silent(seen: RankStatus, limit_seconds: float) -> bool:
    """Return whether the rank with the status ``seen`` has been silent for longer than ``limit_seconds``; False if
    ``limit_seconds`` is 0, which means no limit."""
    sooner = replace(seen, silent_seconds=seen.silent_seconds - _SLACK_SECONDS)
    found = root_cause([sooner], limit_seconds) if limit_seconds else None
    return found is not None and found[1] is FailureKind.SILENT

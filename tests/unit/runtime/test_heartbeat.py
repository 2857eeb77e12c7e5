"""What a launcher concludes from the files in which its ranks say that they are there."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parallax.common import signals
from parallax.common.signals import Requests
from parallax.plan.schedule import Action, Kind
from parallax.runtime.failure import heartbeat
from parallax.runtime.failure.heartbeat import BeatStatus, FileHeartbeat, Heartbeats
from parallax.runtime.failure.report import FailureKind, RankStatus

SEEN = RankStatus(Action(Kind.FORWARD, 0, 1), 3)
LIMIT, GRACE = 60.0, 20.0
LATER = 7.0  # seconds from one look to the next


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


Begin = Callable[[int], FileHeartbeat]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """What makes the heartbeat of a rank."""
    with contextlib.ExitStack() as stack:

        def make(rank: int) -> FileHeartbeat:
            made = FileHeartbeat(tmp_path, rank)
            stack.callback(made.end)
            return made

        yield make


def beat(each: FileHeartbeat, *, seen: RankStatus = SEEN, limit: float = LIMIT) -> None:
    each.beat(BeatStatus("rank 0", seen, limit, GRACE))


def seconds_until(clock: Clock, looks: Callable[[], bool], most: float = 1000.0) -> float | None:
    """Until ``looks`` says so; None where it never does."""
    begun = clock.now
    while clock.now - begun < most:
        clock.now += LATER
        if looks():
            return clock.now - begun
    return None


@pytest.mark.parametrize(
    ("seen", "expected"),
    [(SEEN, LIMIT), (RankStatus(phase="building the engine"), 5 * LIMIT)],
    ids=["in a step", "before steps"],
)
def test_silence_of_all(
    tmp_path: Path, begin: Begin, clock: Clock, seen: RankStatus, expected: float
) -> None:
    heard = Heartbeats(tmp_path, 2, Requests())
    for rank in (0, 1):
        beat(begin(rank), seen=seen)
    found = seconds_until(clock, heard.have_stopped)
    assert expected < (found or 0.0) < expected + 20
    assert heard.report is not None
    assert heard.report.how is FailureKind.SILENT
    assert "nor has any other rank" in heard.report.text


def test_a_rank_that_answers_leaves_the_verdict_to_the_ranks(
    tmp_path: Path, begin: Begin, clock: Clock
) -> None:
    heard = Heartbeats(tmp_path, 2, Requests())
    silent, there = begin(0), begin(1)
    beat(silent)

    def looks() -> bool:
        beat(there)
        return heard.have_stopped()

    assert seconds_until(clock, looks) is None
    there.end()
    assert heard.living([0, 1]) == [0]
    assert seconds_until(clock, heard.have_stopped) is not None  # no process is left to


def test_nothing_is_concluded_without_a_limit_or_before_all_have_begun(
    tmp_path: Path, begin: Begin, clock: Clock
) -> None:
    heard = Heartbeats(tmp_path, 2, Requests())
    first = begin(0)
    beat(first)
    assert seconds_until(clock, heard.have_stopped) is None
    beat(begin(1), limit=0.0)
    assert seconds_until(clock, heard.have_stopped) is None


def test_a_launcher_that_was_stopped_itself_reports_no_rank(
    tmp_path: Path, begin: Begin, clock: Clock
) -> None:
    heard = Heartbeats(tmp_path, 1, Requests())
    beat(begin(0))
    clock.now += LATER
    assert not heard.have_stopped()
    clock.now += 100 * LIMIT
    assert not heard.have_stopped()


def test_a_request_is_granted_its_grace_and_no_more(
    tmp_path: Path, begin: Begin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "time", clock)
    requests = Requests()
    heard = Heartbeats(tmp_path, 1, requests)
    beat(begin(0), limit=0.0)
    requests.add(signal.SIGTERM)
    found = seconds_until(clock, heard.have_stopped)
    assert GRACE < (found or 0.0) < GRACE + 15
    assert heard.report is not None
    assert heard.report.how is FailureKind.OVERDUE
    assert heard.report.code == 143


def test_what_cannot_be_written_is_no_silence(
    tmp_path: Path, begin: Begin, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, rank = Heartbeats(tmp_path, 1, Requests()), begin(0)
    beat(rank)
    clock.now += LATER
    assert not heard.have_stopped()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    beat(rank)
    assert heard.living([0]) == [0]
    assert seconds_until(clock, heard.have_stopped) is None

"""A logger in a thread of its own: points are never waited for, each step is sent once, failures are counted."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.train.loggers.destination import LOGGERS, LoggedRun, Point, logger_named
from parallax.train.loggers.sender import MOST_WAITING, LogSender, figures_of, reason_of
from parallax.train.monitor import LoggerConfig, MetricsLog, Unwritten


class Memory:
    """A logger and its only run: points in a list, which outlives a start as a server does."""

    held = None

    def __init__(self, *, replaces: bool = False) -> None:
        self.replaces, self.points = replaces, list[Point]()
        self.ids, self.opened, self.closed = list[tuple[str, bool]](), threading.Event(), False
        self.may_write, self.fails = threading.Event(), False
        self.may_write.set()

    def load(self) -> None:
        """No-op."""

    def open_run(self, run: LoggedRun, id: str, *, new: bool, last: int) -> Memory:
        self.ids.append((id, new))
        if self.replaces:
            self.points = [point for point in self.points if point[0] <= last]
        self.opened.set()
        return self

    def write(self, points: Sequence[Point]) -> None:
        self.may_write.wait()
        if self.fails:
            raise ConnectionError("nobody listens at http://me:secret@host")
        self.points += points

    def close(self, *, failed: bool) -> None:
        self.closed = True


def a_start(memory: Memory, folder: Path, done: int, steps: Sequence[int]) -> dict[str, int]:
    """Send steps in a run that resumes after ``done``; return the failures."""
    sender = LogSender("memory", memory, LoggedRun(directory=folder, name="run", done=done))
    for step in steps:
        sender.send(step, {"loss": float(step)})
    sender.close(failed=False)
    return sender.take_failures()


@pytest.mark.parametrize("replaces", [False, True])
def test_repeated_steps_are_there_once(tmp_path: Path, replaces: bool) -> None:
    memory = Memory(replaces=replaces)
    assert a_start(memory, tmp_path, 0, range(1, 8)) == {}
    assert a_start(memory, tmp_path, 5, (6, 7, 8)) == {}
    assert [step for step, _ in memory.points] == list(range(1, 9))
    (first, new), (second, again) = memory.ids
    assert (first == second, new, again) == (True, True, False)


@pytest.mark.parametrize("replaces", [False, True])
def test_steps_that_were_not_sent_are_sent_when_the_run_resumes(
    tmp_path: Path, replaces: bool
) -> None:
    memory = Memory(replaces=replaces)
    memory.fails = True
    lines = [json.dumps({"step": step, "loss": float(step)}) + "\n" for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (text,) = failures = a_start(memory, tmp_path, 0, range(1, 6))
    assert text == ("the logger memory fails: ConnectionError: nobody listens at http://***@host")
    assert failures[text] == 5
    memory.fails = False
    assert a_start(memory, tmp_path, 4, (5,)) == {}
    assert memory.points == [(step, {"loss": float(step)}) for step in range(1, 6)]


def test_points_that_do_not_fit_are_dropped_and_counted(tmp_path: Path) -> None:
    memory = Memory()
    memory.may_write.clear()
    sender = LogSender("memory", memory, LoggedRun(directory=tmp_path, name="run"))
    memory.opened.wait()
    sender.send(1, {})  # the thread may have taken the points before
    for step in range(2, 2 * MOST_WAITING):
        sender.send(step, {"loss": 0.0})
    (text,) = failures = sender.take_failures()
    assert text == "the logger memory is too slow, so it gets some of the points only"
    memory.may_write.set()
    sender.close(failed=False)
    assert len(memory.points) + failures[text] == 2 * MOST_WAITING - 1
    assert memory.closed


def test_another_run_in_the_same_folder_is_another_run_for_a_logger(tmp_path: Path) -> None:
    memory = Memory()
    for rate in (0.1, 0.2):
        run = LoggedRun(directory=tmp_path, name="run", parameters={"lr": rate})
        sender = LogSender("memory", memory, run)
        sender.send(1, {"loss": rate})
        sender.close(failed=True)
    assert len(memory.points) == 2
    assert len({id for id, _ in memory.ids}) == 2


def test_a_failure_is_reported_once_and_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").mkdir()
    unwritten = Unwritten()
    with MetricsLog(tmp_path, LoggerConfig(to=["csv"]), unwritten) as log:
        for step in (1, 2, 3):
            log.write({"step": step, "loss": 1.0})
    assert unwritten.news() == [
        "the logger csv cannot be opened: IsADirectoryError: Is a directory"
    ]
    assert [line.rpartition(" (")[2] for line in unwritten.lines()] == ["4 times)"]


def test_a_table_gets_a_column_for_a_new_figure(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, LoggerConfig(to=["csv"])) as log:
        log.write({"step": 1, "loss": 2.5, "note": "no number", "nothing": None})
        log.write({"step": 1, "accuracy": 0.5}, {"rank/0/memory": 0.25})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,loss,accuracy,rank/0/memory",
        "1,2.5,,",
        "1,,0.5,0.25",
    ]


def test_secrets_are_not_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a1b2c3d4")
    assert reason_of(ValueError("key a1b2c3d4 is wrong\nmore")) == "ValueError: key *** is wrong"


def test_figures_are_the_numbers_of_a_record() -> None:
    record = {"step": 3, "loss": 1, "done": True, "text": "a", "none": None, "rate": 0.5}
    assert figures_of(record) == {"loss": 1.0, "rate": 0.5}


def test_settings_name_loggers() -> None:
    with pytest.raises(ConfigError, match=r"logger.to=wnadb.*did you mean 'wandb'"):
        LoggerConfig(to=["csv", "wnadb"])
    assert all(callable(logger_named(name).open_run) for name in ("csv", "tensorboard"))
    assert set(LoggerConfig().to) < set(LOGGERS)

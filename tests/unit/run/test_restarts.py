"""Which failures lead to a restart, how often, and the messages."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from parallax.errors import (
    BudgetExceeded,
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    SwapError,
    TransportError,
)
from parallax.run.processes.restarts import Failure, Restarts
from parallax.runtime.failure.exit_report import failure_of
from parallax.runtime.failure.report import FailureKind, FailureReport

KILLED = {1: -signal.SIGKILL}


def stepped(directory: Path, step: int) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")


def restarts(directory: Path, limit: int = 9) -> Restarts:
    return Restarts(limit, directory, directory / "checkpoints")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(5, "a disk that went away"), True),
        (ConnectionResetError("by a store of rows"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DataLoader worker exited unexpectedly"), True),
        (SwapError("cannot read 4 bytes"), True),
        (TransportError("closed"), True),
        (ValueError("boom"), False),
        (KeyError("boom"), False),
        (ModuleNotFoundError("boom"), False),
        (NotImplementedError("boom"), False),
        (ConfigError("wrong"), False),
        (DataError("no rows"), False),
        (CheckpointError("damaged"), False),
        (NonFiniteError("the loss is NaN"), False),
        (BudgetExceeded("nothing is left to move"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_machines_may_recover_and_mistakes_do_not(
    tmp_path: Path, error: Exception, passes: bool
) -> None:
    report = FailureReport.from_dict(failure_of(error, None).to_dict())  # as it travels
    failure = Failure.of({0: report.code}, report)
    refused = restarts(tmp_path).refused(failure, stop_requested=False)
    assert (refused is None) == passes


def test_a_point_that_was_asked_to_end_is_not_started(tmp_path: Path) -> None:
    ours = restarts(tmp_path)
    overdue = FailureReport(0, FailureKind.OVERDUE, "stopped by SIGTERM", "but", code=143)
    assert ours.refused(Failure.of({0: 143}, overdue), stop_requested=False) is not None
    assert ours.refused(Failure.of({0: -signal.SIGTERM}, None), stop_requested=False) is not None
    assert ours.refused(Failure.of(KILLED, None), stop_requested=True) is not None
    assert restarts(tmp_path, 0).refused(Failure.of(KILLED, None), stop_requested=False) is not None


def test_progress_is_what_counts(tmp_path: Path) -> None:
    """Repeated kills are retried as long as steps are made in between, or another rank is killed."""
    ours = restarts(tmp_path)
    for step in (1, 2, 2, 3, 3):
        stepped(tmp_path, step)
        assert ours.refused(Failure.of(KILLED, None), stop_requested=False) is None
    assert ours.refused(Failure.of({0: -signal.SIGKILL}, None), stop_requested=False) is None
    answers = [ours.refused(Failure.of(KILLED, None), stop_requested=False) for _ in range(3)]
    assert answers[:2] == [None, None]
    assert answers[2] == (
        "the same failure came 3 times at the same step, so nothing is started again; "
        "run again to start from the beginning: there is no checkpoint yet"
    )
    saved = tmp_path / "checkpoints/step-00000003"
    saved.mkdir(parents=True)
    (saved / "checkpoint.json").touch()
    assert str(ours.refused(Failure.of(KILLED, None), stop_requested=False)).endswith(
        "run again to continue from the last checkpoint"
    )


def test_the_messages_of_restarts(tmp_path: Path) -> None:
    ours = restarts(tmp_path, 2)
    lost = FailureReport(1, FailureKind.LOST, "rank 1 (stage 1)", "ended", ", last seen saving")
    failure = Failure.of({0: 1, **KILLED}, lost)
    assert failure.report.text == (
        "rank 1 (stage 1) was killed by SIGKILL (no memory left?), last seen saving"
    )
    assert ours.refused(failure, stop_requested=False) is None
    assert (
        ours.next()
        == "starting again from the beginning: there is no checkpoint yet (1 of 2 restarts left)"
    )
    assert Failure.of({0: 3}, None).report.text == "rank 0 ended with exit code 3"
    assert Failure.of({0: -signal.SIGSEGV}, None).report.text == "rank 0 was killed by SIGSEGV"
    assert "starts the ranks was killed by SIGKILL" in Failure.of_server(-9, None).report.text

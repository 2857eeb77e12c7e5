"""Ranks that end, or stand still, all at once: none of them is left to say so. Their launcher does."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax import cli
from parallax.runtime.checkpoint import list_checkpoints
from tests.faults.commands import (
    DONE_SECONDS,
    ENDLESS,
    finish,
    one_line,
    prepared,
    ranks,
    running,
    stepping,
    temporary,
)
from tests.faults.failing import fail_at

Called = Callable[..., tuple[int, str, str]]

STEP = 2
BEATS_SECONDS = 1.5  # in which every rank tells of its steps
SETTINGS = [
    "trainer.steps=1000",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=0",
    "trainer.max_restarts=3",
    "data.max_bytes=64KiB",
    "logger=none",
]
SEEN = "last seen in forward of micro-batch 0, step 2"
EARLY = "ended with exit code 0 before the run's end"
EXIT = "its code called exit; let it raise, or return"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "replicas", "expected"),
    [
        (
            "exits",
            (1,),
            r"rank 0 \(stage 0, replica 0\) failed in forward of micro-batch 0, step 2: SystemExit: 0",
        ),
        ("leaves", (1,), rf"rank 0 {EARLY}: {EXIT}"),
        ("leaves", (1, 1), rf"rank 0 \(stage 0, replica 0\) {EARLY}, {SEEN}: {EXIT}"),
    ],
)
def test_a_call_of_exit_is_no_end_of_a_run(
    here: Path, called: Called, fault: str, replicas: tuple[int, ...], expected: str
) -> None:
    """Nor is it started again: it would call it again."""
    run = prepared(*fail_at(0, STEP, "forward", fault), *SETTINGS, replicas=replicas)
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("parallax: ")]
    assert re.fullmatch(f"parallax: {expected}", line), line
    assert err.count("Traceback") == (fault == "exits")
    assert running(here) == []
    assert temporary() == []


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_model_that_calls_exit_is_not_made(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (here / "exiting.py").write_text("import sys\ndef build():\n    sys.exit(0)\n")
    monkeypatch.syspath_prepend(str(here))
    own = ["model=custom", "model.target=exiting:build", "data.max_bytes=64KiB", "trainer.steps=3"]
    assert cli.main([command, *own, "cluster.devices=1"]) == 1
    assert "exiting.py" in capfd.readouterr().err


@pytest.mark.faults
@pytest.mark.parametrize("replicas", [(1,), (1, 1)], ids=str)
def test_all_ranks_are_stopped(here: Path, replicas: tuple[int, ...]) -> None:
    run = prepared(*ENDLESS, "trainer.watchdog_seconds=1", replicas=replicas)
    launcher = stepping(run)
    time.sleep(BEATS_SECONDS)
    begun = time.monotonic()
    for process in ranks(launcher):
        process.suspend()
    code, _, err = finish(launcher)
    print(f"all ranks of {replicas} stopped: reported after {time.monotonic() - begun:.1f} s")
    assert code == 1
    others = "" if len(replicas) == 1 else ", nor has any other rank"
    assert re.fullmatch(
        rf"parallax: rank \d \(stage \d, replica 0\) has not answered for \d+ s{others} \(stopped\?\), last seen "
        r".*; the limit is 2 s \(trainer\.watchdog_seconds; 0 sets none\); run again to .*",
        one_line(err),
    ), err
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
def test_the_grace_ends_for_ranks_that_are_stopped(here: Path) -> None:
    """The launcher waits no longer than the limit for ranks that cannot even say that they are late."""
    run = prepared(*ENDLESS, "trainer.watchdog_seconds=0", "trainer.grace_seconds=1", replicas=(1,))
    launcher = stepping(run)
    time.sleep(BEATS_SECONDS)
    for process in ranks(launcher):
        process.suspend()
    launcher.send_signal(signal.SIGTERM)
    code, _, err = finish(launcher)
    assert code == 143
    assert re.fullmatch(
        r"parallax: stopped by SIGTERM, but nothing could be saved within 1 s \(trainer\.grace_seconds\): rank 0 "
        r"\(stage 0, replica 0\) has not answered for \d+ s \(stopped\?\), last seen .*; the steps after the last "
        r"checkpoint are lost, the same run continues from there.*",
        one_line(err),
    ), err
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
def test_more_requests_than_one_are_one(here: Path) -> None:
    """Further signals change nothing, also after the last checkpoint."""
    run = prepared(*ENDLESS, replicas=(1,))
    launcher = stepping(run)
    end = time.monotonic() + DONE_SECONDS
    while launcher.poll() is None:
        assert time.monotonic() < end
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    code, _, err = finish(launcher)
    assert code == 0, err
    assert re.fullmatch(
        r"parallax: stopped by SIGTERM after step \d+ of .*, which is saved; .*", one_line(err)
    )
    assert len(list_checkpoints(run / "checkpoints")) == 1

"""The user's own code hangs before there are ranks: the command ends in one line, and at Ctrl-C at once."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.commands import (
    MODULE,
    finish,
    one_line,
    running,
    start,
    temporary,
    wait_for,
)

OWN = """
import ctypes, os, pathlib, threading, time, torch
from torch import nn
from parallax import TensorRows

def hang():
    pathlib.Path("hangs").touch()
    how = os.environ["HOW"]
    if how == "sleeps":
        threading.Event().wait(600)
    if how == "spins":
        while True:
            pass
    if how == "heeds nothing":  # a lock that is held already: no signal ends the wait
        mutex = ctypes.create_string_buffer(64)
        lock = ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)
    while how == "continues":
        try:
            time.sleep(600)
        except (Exception, KeyboardInterrupt):
            pass
    end = time.monotonic() + 2.5
    while time.monotonic() < end and not pathlib.Path("done").exists():  # works
        sum(range(10000))
    pathlib.Path("done").touch()

def build():
    if os.environ["WHERE"] == "model":
        hang()
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

class Rows:
    def __init__(self):
        if os.environ["WHERE"] == "data":
            hang()
    def batch(self, rows):
        return TensorRows(torch.zeros(rows, 4), torch.zeros(rows, dtype=torch.int64))
    def validation(self, index, rows):
        return self.batch(rows)
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass
"""
CUSTOM = ["model=custom", "model.target=hanging:build", "data=custom", "data.target=hanging:Rows"]
LIMITED = [
    *CUSTOM,
    "trainer.global_batch=4",
    "trainer.steps=3",
    "trainer.watchdog_seconds=1.5",
]


def hanging(command: str, *overrides: str, how: str, where: str = "model") -> subprocess.Popen[str]:
    Path("hanging.py").write_text(OWN)
    return start([*MODULE, command, *LIMITED, *overrides], HOW=how, WHERE=where)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("command", "where", "how"),
    [
        ("train", "data", "heeds nothing"),
        # A process that ignores signals also sleeps, and a model that spins is a case below.
        pytest.param("train", "model", "sleeps", marks=pytest.mark.thorough),
        pytest.param("plan", "data", "sleeps", marks=pytest.mark.thorough),
        pytest.param("profile", "model", "sleeps", marks=pytest.mark.thorough),
        pytest.param("estimate", "model", "sleeps", marks=pytest.mark.thorough),
    ],
)
def test_a_hang_is_named_with_the_users_function(
    here: Path, command: str, where: str, how: str
) -> None:
    code, out, err = finish(hanging(command, how=how, where=where))
    assert (code, out) == (1, "")
    what = {
        "train": "planning",
        "plan": "planning",
        "profile": "profiling",
        "estimate": "counting",
    }[command]
    doing = {
        "model": r"building the model \(model.target=hanging:build\)",
        "data": "(building the model|fetching rows) ",
    }
    assert re.match(
        rf"parallax: {what} hangs: {doing[where]}.*, \d+ s without a sign of life; the limit is 1.5 s "
        rf"\(trainer.watchdog_seconds; 0 sets none\); it is in hang \(\S*hanging.py:\d+\)$",
        one_line(err),
    ), err
    assert temporary() == []
    if how == "sleeps":
        assert {path.name for path in here.iterdir()} - {"__pycache__"} == {"hanging.py", "hangs"}


@pytest.mark.faults
def test_what_spins_has_the_other_limit(here: Path) -> None:
    code, _, err = finish(hanging("plan", "trainer.phase_seconds=2", how="spins"))
    assert code == 1
    assert "(model.target=hanging:build), for " in one_line(err)
    assert "the limit is 2 s (trainer.phase_seconds; 0 sets none); it is in hang (" in one_line(err)


@pytest.mark.thorough  # as above, where what spins is no hang until the other limit
def test_work_is_no_hang(here: Path) -> None:
    assert finish(hanging("estimate", how="works"))[0] == 0
    assert Path("done").exists()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("command", "how"),
    [
        pytest.param("train", "sleeps", marks=pytest.mark.thorough),
        ("train", "heeds nothing"),
        pytest.param("plan", "spins", marks=pytest.mark.thorough),
        ("plan", "continues"),
    ],
)
def test_ctrl_c_ends_it_at_once(here: Path, command: str, how: str) -> None:
    process = hanging(command, "trainer.watchdog_seconds=0", how=how)
    wait_for((here / "hangs").exists, "the hang")
    process.send_signal(signal.SIGINT)
    if how == "continues":  # what takes the first for its own has the second to reckon with
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    code, _, err = finish(process)
    assert (code, one_line(err)) == (130, "parallax: stopped by SIGINT")
    assert time.monotonic() - begun < 30  # not what the function would take
    assert running(here) == []
    assert temporary() == []

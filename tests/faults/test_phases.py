"""A hang outside of steps: named by rank, phase, seconds and place, wherever it is. Work that takes long is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallax.errors import AbsentError
from parallax.nodes.joining import wait_for_all
from tests.faults.commands import one_line, prepared, running, temporary

# The last rank hangs, or is busy for a while, when something is called for the first time.
MODEL = """
import os, pathlib, time, torch
from torch import nn
from parallax import TensorRows

def stuck_in(what):
    if "RANK" in os.environ and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        stuck = dict(each.split("=") for each in os.environ["STUCK"].split(", "))
        if what in stuck:
            how(stuck[what])

def how(hangs):
    if hangs == "sleeps":
        time.sleep(600)
    while hangs == "polls":
        time.sleep(0.01)
    begun = time.monotonic()
    while time.monotonic() < begun + 3 and not pathlib.Path("done").exists():  # works
        sum(range(10000))
    pathlib.Path("done").touch()

class Some(TensorRows):
    def __len__(self):  # called outside of all phases and actions
        if "RANK" in os.environ and Rows.trains:
            stuck_in("between steps")
        return super().__len__()

class Rows:
    fetched, trains = 0, False
    def __init__(self):
        stuck_in("loading data")
    def batch(self, rows):
        self.fetched, Rows.trains = self.fetched + 1, True
        stuck_in("fetching rows")
        return self.some(rows)
    def validation(self, index, rows):
        if self.fetched:  # before, it is the sample that the model is described with
            stuck_in("evaluating")
        return self.some(rows)
    def some(self, rows):
        return Some(torch.zeros(rows, 4, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    def state_dict(self):
        if self.fetched == 2:
            stuck_in("saving a checkpoint")
        return {}
    def load_state_dict(self, state):
        stuck_in("loading a checkpoint")
    @property
    def unigram_entropy(self):
        return 1.0

class Block(nn.Linear):
    def __setstate__(self, state):  # of the stage's own copy
        stuck_in("building the engine")
        super().__setstate__(state)

def build():
    stuck_in("building the model")
    return nn.Sequential(nn.Embedding(8, 8), nn.Flatten(), nn.Linear(32, 8), Block(8, 8))
"""
OWN = [
    "model=custom",
    "model.target=stuck:build",
    "+model.kwargs={}",
    "data=custom",
    "data.target=stuck:Rows",
]
OWN += [
    "trainer.global_batch=4",
    "trainer.microbatch=2",
    "logger=none",
    "trainer.steps=2",
]
OWN += ["trainer.watchdog_seconds=2"]


AFTER_STEPS = "evaluating", "saving a checkpoint"
Stuck = Callable[..., tuple[Path, int, str]]


@pytest.fixture
def stuck(called: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Stuck:
    """A run that is stuck in a phase, as in ``"loading data=sleeps"``."""

    def run(
        where: str, *overrides: str, replicas: tuple[int, ...] = (1, 1), code: str = MODEL
    ) -> Any:
        Path("stuck.py").write_text(code)
        folder = prepared(*OWN, *overrides, replicas=replicas)
        monkeypatch.setenv("STUCK", where)
        code, _, err = called("train", "--run-dir", str(folder))
        return folder, code, err

    return run


@pytest.mark.faults
@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("building the model", marks=pytest.mark.thorough),
        pytest.param("loading data", marks=pytest.mark.thorough),
        pytest.param("fetching rows", marks=pytest.mark.thorough),
        pytest.param("between steps", marks=pytest.mark.thorough),
        pytest.param("building the engine", marks=pytest.mark.thorough),
        pytest.param("evaluating", marks=pytest.mark.thorough),
        "saving a checkpoint",
    ],
)
def test_a_hang_is_named_wherever_it_is(here: Path, stuck: Stuck, phase: str) -> None:
    """And where it is not, work that takes longer than the limit is none."""
    work = "building the model=works, " if phase in AFTER_STEPS else ""
    run, code, err = stuck(f"{work}{phase}=sleeps")
    assert Path("done").exists() == bool(work), (code, err)
    assert code == 1
    line, after = one_line(err), ", after step 2" if phase in AFTER_STEPS else ""
    assert re.fullmatch(
        rf"parallax: rank 1( \(stage 1, replica 0\))? has been {phase}{after}, for \d+ s, without a sign "
        r"of life( while rank 0 waits,? .*)?; the limit is 2 s \(trainer.watchdog_seconds; 0 sets none\); it is in how "
        rf"\(\S*stuck.py:\d+\); its stacks: runs/run/stacks-rank1.txt",
        line,
    ), line
    assert "in stuck_in" in (run / "stacks-rank1.txt").read_text()
    assert running(here) == []
    assert temporary() == []


WRITING = """
import parallax.runtime.checkpoint.writing as writing
wrote = writing.write_file
def write(*arguments):
    stuck_in("writing")
    return wrote(*arguments)
writing.write_file = write
fetched = Rows.batch
def fetch(self, rows):
    time.sleep(0.4)  # so that the next checkpoint is not due for a while
    return fetched(self, rows)
Rows.batch = fetch
"""


@pytest.mark.faults
def test_a_hang_beside_the_steps_is_named(here: Path, stuck: Stuck) -> None:
    """A checkpoint is written in the background, and training does not wait for it."""
    every = ["trainer.steps=100", "trainer.checkpoint_every=15", "trainer.eval_every=0"]
    _, code, err = stuck("writing=sleeps", *every, code=MODEL + WRITING)
    assert code == 1
    assert re.fullmatch(
        r"parallax: rank 1 \(stage 1, replica 0\) has been writing a checkpoint beside its steps, \d+ s without a sign "
        r"of life; the limit is 2 s \(trainer.watchdog_seconds; 0 sets none\); it is in how \(\S*stuck.py:\d+\); its "
        r"stacks: runs/run/stacks-rank1.txt",
        one_line(err),
    ), err
    assert running(here) == []


@pytest.mark.thorough  # as before the hang after steps, but to the end of the run
def test_work_is_no_hang(stuck: Stuck) -> None:
    run, code, err = stuck("building the model=works", replicas=(1,))
    assert (code, err) == (0, "")
    assert (run / "summary.json").exists()


@pytest.mark.thorough  # as what spins before there are ranks, in test_working.py
def test_what_polls_has_a_limit_of_its_own(stuck: Stuck) -> None:
    """It shows signs of life for ever."""
    _, code, err = stuck("building the model=polls", "trainer.phase_seconds=4", replicas=(1,))
    assert code == 1
    assert "rank 0 has been building the model, for " in one_line(err)
    assert "the limit is 4 s (trainer.phase_seconds; 0 sets none)" in one_line(err)


# ---- before there is a watch


def test_ranks_that_never_come_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def come(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 4)
        wait_for_all(store, rank, 4, join_seconds=1.0, note_seconds=0.3)

    with ThreadPoolExecutor(2) as threads:
        ended = [threads.submit(come, rank) for rank in (1, 3)]
    for each in ended:
        with pytest.raises(AbsentError, match=r"^ranks 0, 2 of 4 have not joined within 1 s: "):
            each.result()
    assert capfd.readouterr().err == "parallax: waiting for 2 of 4 ranks: ranks 0, 2; up to 1 s\n"


def test_ranks_that_come_are_not_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def come(rank: int) -> None:
        wait_for_all(dist.FileStore(str(tmp_path / "store"), 3), rank, 3, note_seconds=20.0)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(come, range(3))) == [None] * 3
    assert capfd.readouterr().err == ""

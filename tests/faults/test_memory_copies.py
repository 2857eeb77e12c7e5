"""Copies of the state in memory: a rank that is killed takes one step with it at most, though no disk has any."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.nodes.memory_folder import has_copies
from parallax.runtime.checkpoint import list_checkpoints, step_of
from tests.faults.commands import one_line, prepared, running, temporary
from tests.faults.killing import kill_at
from tests.faults.test_restarts import STEPS, check_as_if_nothing_had_been, plain

KILLS = ((1, 3, "forward"), (0, 5, "backward"), (1, 7, "update"))
FROM = "the newest copy in memory, or else the beginning: there is no checkpoint yet"


@pytest.mark.faults
def test_a_killed_rank_takes_one_step_with_it(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    reference = plain(called, *kill_at())
    run = prepared(
        *kill_at(*KILLS),
        *(f"trainer.steps={STEPS}", f"trainer.max_restarts={len(KILLS)}"),
        *("trainer.checkpoint_every=0", "checkpoint.memory=true"),
    )
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    lines = err.splitlines()
    assert len(lines) == len(KILLS)
    for left, line in enumerate(reversed(lines)):
        assert line.endswith(f"; starting again from {FROM} ({left} of {len(KILLS)} restarts left)")
    begun = re.findall(r"continuing after step (\d+) from (/dev/shm/\S+)", out)
    assert len(begun) == len(KILLS), out
    for (_, step, _), (after, _) in zip(KILLS, begun, strict=True):
        assert step - 1 <= int(after) <= step
    summary = json.loads((run / "summary.json").read_text())
    assert summary["restarts"] == len(KILLS)
    assert summary["lost_steps"] <= len(KILLS)
    check_as_if_nothing_had_been(run, reference)
    assert not any(Path(where).exists() for _, where in begun)
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
def test_where_nothing_starts_again_the_last_one_goes_to_the_disk(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    reference = plain(called, *kill_at())
    run = prepared(
        *kill_at((1, 3, "forward")),
        *(f"trainer.steps={STEPS}", "trainer.max_restarts=0"),
        *("trainer.checkpoint_every=0", "checkpoint.memory=true"),
    )
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 1
    assert "was killed by SIGKILL" in one_line(err)
    (saved,) = list_checkpoints(run / "checkpoints")
    assert f"step {step_of(saved)}: checkpoint {saved}, from its copy in memory" in out
    assert 2 <= (step_of(saved) or 0) <= 3
    assert not has_copies(run)
    code, out, err = called("train", "--run-dir", str(run))
    assert (code, err) == (0, "")
    assert f"continuing after step {step_of(saved)} from {saved}" in out
    check_as_if_nothing_had_been(run, reference)
    assert running(here) == []
    assert temporary() == []


SLOWLY = """
import time
from tests.faults import killing

class Rows(killing.Rows):
    def batch(self, rows):
        time.sleep(0.8)
        return super().batch(rows)
"""


@pytest.mark.faults
def test_nobody_has_to_ask_for_them(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    """After some seconds there is one, where there is room; in the end there is none."""
    reference = plain(called, *kill_at())
    Path("slowly.py").write_text(SLOWLY)
    settings = [*kill_at((1, 7, "forward")), "data.target=slowly:Rows"]
    settings += [f"trainer.steps={STEPS}", "trainer.max_restarts=3", "trainer.checkpoint_every=0"]
    run = prepared(*settings)
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    assert one_line(err).endswith(f"; starting again from {FROM} (2 of 3 restarts left)")
    ((after, where),) = re.findall(r"continuing after step (\d+) from (/dev/shm/\S+)", out)
    assert 1 <= int(after) <= 7
    check_as_if_nothing_had_been(run, reference)
    assert not Path(where).parent.exists()
    assert not has_copies(run)

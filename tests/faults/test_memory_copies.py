"""Copies of the state in memory: a rank that is killed takes one step with it at most, though no disk has any."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import prepared, running, temporary
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

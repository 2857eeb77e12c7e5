"""One rank that stays five times slower: named, and trained with; where plans may change, it is given less."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.plan.plan import Plan
from tests.faults.commands import temporary

# Each block takes 3 ms, and 15 ms on the second rank, as if its device were hot.
MODEL = """
import os, time, torch
from torch import nn
from parallax import TensorRows

class Block(nn.Linear):
    def forward(self, x):
        end = time.monotonic() + 0.003 * (5 if os.environ.get("RANK") == "1" else 1)
        while time.monotonic() < end:
            pass
        return super().forward(x)

def build():
    return nn.Sequential(*(Block(16, 16) for _ in range(12)))

class Rows:
    def batch(self, rows):
        return TensorRows(torch.ones(rows, 16), torch.zeros(rows, dtype=torch.int64))
    def validation(self, index, rows):
        return self.batch(rows)
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass
"""
OWN = ["model=custom", "model.target=slow:build", "+model.kwargs={}"]
OWN += ["data=custom", "data.target=slow:Rows", "logger=none", "cluster.devices=2"]
OWN += ["trainer.global_batch=4", "trainer.microbatch=1", "trainer.eval_every=0", "plan.stages=2"]
OWN += ["plan.replicas=1", "trainer.eval_batches=1", "swap=off", "plan.schedule=gpipe"]


@pytest.mark.faults
@pytest.mark.parametrize("replan", ["off", "auto"])
def test_a_slow_rank(
    here: Path,
    called: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    replan: str,
) -> None:
    # Both runs measure for themselves.
    monkeypatch.setenv("XDG_CACHE_HOME", str(here.parent / "cache"))
    Path("slow.py").write_text(MODEL)
    steps = ["trainer.steps=30", "trainer.checkpoint_every=15", "name=run", f"plan.replan={replan}"]
    code, out, err = called("train", *OWN, *steps)
    assert (code, err) == (0, "")
    assert out.count("times as long as predicted, beside the other ranks; training continues") == 1
    assert "rank 1 (stage 1, replica 0, on " in out
    run = Path("runs/run")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["ended"]) == (30, "steps")
    plan = Plan.load(run / "plan.yaml")
    its = plan.stages[
        plan.coordinate(1).pipeline_rank
    ]  # the slow rank's, which may be the first in the new plan
    if replan == "off":
        assert [found["rank"] for found in summary["stragglers"]] == [1]
        return
    assert "planning again: rank 1 (stage 1" in out
    had = re.search(r"times slower: it had blocks (\d+)..11, and now has blocks ", out)
    assert had is not None
    assert its.stop - its.start < min(5, 12 - int(had[1]))
    assert summary["stragglers"] == [], "as the new plan predicts"
    assert temporary() == []

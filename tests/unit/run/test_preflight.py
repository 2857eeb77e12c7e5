"""The bytes that a start still writes, which preflight compares with the free disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallax import config
from parallax.model.factory.mlp import MLPConfig
from parallax.run import preflight
from parallax.run.prepare import PreparedRun
from parallax.runtime.checkpoint import checkpoint_name
from tests.plans import described, make_plan


@pytest.mark.parametrize(
    ("settings", "done", "expected"),
    [
        (["trainer.steps=10", "trainer.checkpoint_every=3"], 0, 4),  # 3, 6, 9, and 10
        (["trainer.steps=9", "trainer.checkpoint_every=3"], 0, 3),  # the last is both
        (["trainer.steps=10", "trainer.checkpoint_every=3"], 6, 2),
        (["trainer.steps=10", "trainer.checkpoint_every=3"], 10, 0),
        (["trainer.steps=10", "trainer.checkpoint_every=0"], 4, 1),
        (["trainer.steps=10", "trainer.checkpoint_every=3", "trainer.resume=never"], 6, 4),
    ],
)
def test_disk_space_is_needed_for_what_is_still_to_be_saved(
    settings: list[str], done: int, expected: int
) -> None:
    """A run with two steps left needs no space for as many checkpoints as could be kept."""
    plan = make_plan(described(MLPConfig(layers=2, hidden=16, embedding=4, sequence=4).build))
    run = PreparedRun(Path(), config.compose(["experiment=tiny", *settings]), plan)
    there = [Path(checkpoint_name(done))] if done else []
    assert preflight._saves_to_come(run, there) == expected

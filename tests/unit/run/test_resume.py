"""The settings of a run that resumes: typed changes are reported, and so is their effect on the learning-rate
schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallax.config import compose, dump
from parallax.run.resume import STORED, settings
from parallax.runtime.checkpoint.folder import INDEX

RATES = ["optimizer.lr=0.001", "schedule.final=0.1", "schedule.warmup=0"]
RUN = ["model=mlp", "name=a", "trainer.steps=60", *RATES]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], ""),
        (["trainer.steps=60"], ""),
        (["trainer.eval_every=7"], ""),
        (
            ["trainer.steps=120"],
            "the learning rate of step 61 is 0.00055 and not 0.0001, as the schedule now ends at step 120 and not "
            "60; at its end it is 0.0001",
        ),
        (
            ["trainer.steps=120", "optimizer.lr=0.0001"],
            "the learning rate of step 61 is 5.5e-05 and not 0.0001, as the schedule now ends at step 120 and not "
            "60; at its end it is 1e-05",
        ),
    ],
)
def test_a_learning_rate_that_changes_at_resume_is_reported(
    tmp_path: Path, typed: list[str], message: str
) -> None:
    (tmp_path / "a/checkpoints/step-00000060").mkdir(parents=True)
    (tmp_path / "a/checkpoints/step-00000060" / INDEX).touch()
    (tmp_path / "a" / STORED).write_text(dump(compose(RUN)))
    found = settings(["name=a", *typed], tmp_path)
    assert found.changed is not None
    assert found.rate == message

"""The length of a resumed run, in steps or epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.config import compose
from parallax.run.resume import _without_other_length


@pytest.mark.parametrize(
    ("override", "left"),
    [
        ("trainer.steps=500", (60, 0)),
        ("trainer.epochs=3", (0, 1)),
        ("trainer.global_batch=32", (0, 1)),  # another number of steps for the same epochs
    ],
)
def test_steps_follow_from_epochs_unless_they_are_set(override: str, left: tuple[int, int]) -> None:
    stored = compose(["trainer.epochs=1"])
    stored = replace(stored, trainer=replace(stored.trainer, steps=60))
    found = _without_other_length(stored, [override]).trainer
    assert (found.steps, found.epochs) == left


def test_steps_without_epochs_stay() -> None:
    stored = compose(["trainer.steps=60"])
    assert _without_other_length(stored, ["seed=2"]) == stored

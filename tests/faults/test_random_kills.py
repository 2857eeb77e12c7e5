"""Ranks, the process they come from and the launcher are killed at random: nothing is lost, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.random_kills import play

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.thorough)])
def test_random_kills(here: Path, count: int) -> None:
    """What lies in the temporary folder and in shared memory afterwards fails any test."""
    victims = play(count, 15, print)
    assert victims["rank"] > count / 2

"""How often the state is copied into memory, and when it is not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.machine.host import available_memory
from parallax.nodes.memory_folder import MemoryFolder, forget_copies, has_copies, token_of
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.train.saving.memory_copies import AsTheyCost, EveryFew


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


def test_they_take_their_share_of_the_time(clock: Clock) -> None:
    pace = AsTheyCost(share=0.01, least=3.0)
    assert not pace.due(1)
    clock.now += 3.0
    assert pace.due(2)
    pace.took(0.05)
    for seconds, due in ((4.9, False), (0.2, True)):
        clock.now += seconds
        assert pace.due(3) == due


def test_cheap_ones_are_some_seconds_apart(clock: Clock) -> None:
    pace = AsTheyCost(share=0.01, least=3.0)
    pace.took(0.001)
    clock.now += 2.9
    assert not pace.due(1)
    clock.now += 0.2
    assert pace.due(1)


def test_what_was_asked_for_is_by_steps() -> None:
    assert [EveryFew(2).due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert EveryFew(True).due(7)


def test_as_much_again_must_be_left(tmp_path: Path) -> None:
    folder = MemoryFolder("word", tmp_path)
    folder.open(1000, "copies", left_bytes=available_memory() // 2)
    folder.close(remove=True)
    with pytest.raises(ConfigError, match="and memory has"):
        folder.open(1000, "copies", left_bytes=2 * available_memory())
    folder.close(remove=True)


def test_a_run_knows_whether_it_has_any(tmp_path: Path) -> None:
    assert not has_copies(tmp_path)
    token = token_of(tmp_path)
    assert has_copies(tmp_path)
    assert token_of(tmp_path) == token
    forget_copies(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["often", "Auto", ""])
def test_other_words_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="accepted are auto, true, false or a whole number"):
        CheckpointConfig(memory=value)

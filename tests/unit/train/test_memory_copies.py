"""How often the state is copied into memory, and when it is not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parallax.errors import CheckpointError, ConfigError
from parallax.model.describe import describe
from parallax.model.gpt import GPT, GPTConfig
from parallax.nodes.memory_folder import forget_copies, has_copies, token_of
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.train.monitor import StepLine
from parallax.train.onlooker import Nobody
from parallax.train.saving.memory_copies import AsTheyCost, EveryFew, MemoryCopies, open_copies
from tests.faults.test_full_disk import files_of_at_most
from tests.plans import make_plan


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


class Voice:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def step(self, line: StepLine, metrics: dict[str, Any]) -> None: ...

    def evaluating(self, step: int, done: int, count: int | None) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    chain = describe(GPTConfig(layers=1, hidden=16, heads=2, sequence=8).build)
    made = Engine.build(chain, make_plan(chain), loss=GPT.loss, scratch=tmp_path / "scratch")
    yield made
    made.close()


def copies_of(engine: Engine, run: Path, *, asked: bool) -> MemoryCopies:
    return MemoryCopies(engine, run, EveryFew(1), Nobody(), asked=asked, resumes=True)


def keep(copies: MemoryCopies, voice: Voice) -> None:
    copies.agree(copies.numbers())
    copies.keep(voice, dict)


def test_what_nobody_asked_for_fails_without_harm(engine: Engine, tmp_path: Path) -> None:
    """A full file system of shared memory ends the copies, not the run; those that are there go."""
    voice, copies = Voice(), copies_of(engine, tmp_path, asked=False)
    keep(copies, voice)
    (folder,) = copies.folders
    assert [path.name for path in folder.glob("step-*")] == ["step-00000000"]
    with files_of_at_most(1000):
        keep(copies, voice)
    (note,) = voice.notes
    assert note.startswith("step 0: the state is not copied into memory: ")
    assert "File too large" in note
    assert not folder.exists()
    assert not has_copies(tmp_path)
    keep(copies, voice)
    assert copies.numbers() == (0.0,)
    assert len(voice.notes) == 1


def test_what_was_asked_for_fails_with_the_run(engine: Engine, tmp_path: Path) -> None:
    voice, copies = Voice(), copies_of(engine, tmp_path, asked=True)
    keep(copies, voice)
    with files_of_at_most(1000), pytest.raises(CheckpointError, match="File too large"):
        keep(copies, voice)
    copies.close()


def test_those_of_before_go_where_none_are_wanted(engine: Engine, tmp_path: Path) -> None:
    copies = copies_of(engine, tmp_path, asked=False)
    keep(copies, Voice())
    (folder,), place = copies.folders, copies._place
    assert place is not None
    place.folder.close(remove=False)  # as a killed process leaves it
    none = open_copies(engine, tmp_path, CheckpointConfig(memory=False), Nobody(), resumes=True)
    assert none.folders == ()
    assert not folder.exists()
    assert not has_copies(tmp_path)


def test_those_of_before_are_found_without_a_word(engine: Engine, tmp_path: Path) -> None:
    copies = copies_of(engine, tmp_path, asked=False)
    keep(copies, Voice())
    place = copies._place
    assert place is not None
    place.folder.close(remove=False)
    again = open_copies(engine, tmp_path, CheckpointConfig(), Nobody(), resumes=True)
    assert again.folders == copies.folders
    assert list(again.folders[0].glob("step-*"))
    assert again.numbers() == (0.0,)  # nothing starts these ranks again: no more are made
    again.close()

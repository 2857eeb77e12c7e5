"""What a run's files tell of steps that are taken again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from parallax.train.repeats import forget_steps, last_step, note_restart, noted_restarts


def written(path: Path, *steps: int, end: str = "") -> Path:
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + end)
    return path


@pytest.mark.parametrize(
    ("steps", "end", "first", "kept", "lost"),
    [
        ((1, 2, 3, 4, 5), "", 4, (1, 2, 3), 2),
        ((1, 2, 2, 3, 3, 3), "", 3, (1, 2, 2), 1),  # spans: several lines to a step
        ((1, 2, 3), '{"step": 4', 4, (1, 2, 3), 0),
        ((1, 2, 3), '{"step": 4', 3, (1, 2), 1),
        ((1, 2, 3), "", 1, (), 3),
        ((1, 2, 3), "", 9, (1, 2, 3), 0),
        ((1, 2, 3), "half", sys.maxsize, (1, 2, 3), 0),
        ((), "half", sys.maxsize, (), 0),
        ((), "", 1, (), 0),
        ((1, 2), '{"note": 1}\nno json\n', 2, (1,), 1),
    ],
)
def test_later_steps_are_forgotten(
    tmp_path: Path, steps: tuple[int, ...], end: str, first: int, kept: tuple[int, ...], lost: int
) -> None:
    path = written(tmp_path / "metrics.jsonl", *steps, end=end)
    assert forget_steps(path, first) == lost
    assert path.read_text() == written(tmp_path / "expected", *kept).read_text()
    assert last_step(path) == (kept[-1] if kept else -1)


def test_there_is_nothing_to_forget(tmp_path: Path) -> None:
    assert forget_steps(tmp_path / "missing", 1) == 0
    assert last_step(tmp_path / "missing") == -1
    assert noted_restarts(tmp_path) == (0, 0)


def test_restarts_are_counted(tmp_path: Path) -> None:
    note_restart(tmp_path, 4, 2)
    note_restart(tmp_path, 4, 0)
    with (tmp_path / "restarts.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    assert noted_restarts(tmp_path) == (2, 2)

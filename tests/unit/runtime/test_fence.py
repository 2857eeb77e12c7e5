from __future__ import annotations

from pathlib import Path

import pytest

from parallax.errors import CheckpointError
from parallax.runtime.parts.fence import Fence


def test_of_two_starts_the_later_one_saves(tmp_path: Path) -> None:
    first = Fence.new(tmp_path)
    first.hold(tmp_path)
    second = Fence.new(tmp_path)
    first.hold(tmp_path)  # the second one has not come here yet
    second.hold(tmp_path)
    with pytest.raises(CheckpointError, match=r"was started again on .*, and continues there"):
        first.hold(tmp_path)
    second.hold(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last-start.json"]


def test_a_clock_that_was_put_back_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Fence.new(tmp_path)
    first.hold(tmp_path)
    monkeypatch.setattr("time.time", lambda: 0.0)
    Fence.new(tmp_path).hold(tmp_path)
    with pytest.raises(CheckpointError, match="started again"):
        first.hold(tmp_path)

"""Progress where stderr is no terminal."""

from __future__ import annotations

import pytest

from parallax.train.data import progress as module


def test_lines_are_printed_at_intervals_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation whose output was piped printed nothing until its end."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with module.progress("evaluating", 40, quiet=False) as advance:
        for _ in range(40):
            now[0] += 3
            advance(1)
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[:2] == ["evaluating: 4 of 40 (10%)", "evaluating: 8 of 40 (20%)"]
    assert len(lines) == 10


def test_a_quiet_rank_and_a_short_evaluation_print_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for quiet, count in ((True, 5), (False, 5)):
        with module.progress("reading", None, quiet=quiet, in_bytes=True) as advance:
            for _ in range(count):
                advance(1)
    assert capsys.readouterr() == ("", "")

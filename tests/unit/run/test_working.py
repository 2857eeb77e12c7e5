"""Ctrl-C at any moment leaves nothing of the thread that looks on, and ends no process in the middle of its tidying."""

from __future__ import annotations

import io
import signal
import sys
import threading
from types import FrameType

import pytest
from rich.console import Console

from parallax.run import working as subject
from parallax.run.working import working


class Keyboard:
    """Presses Ctrl-C before line number ``at`` of what begins and ends the looking on."""

    def __init__(self, at: int) -> None:
        self.at, self.line = at, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Keyboard | None:
        if event == "call":
            mine = (
                frame.f_code.co_filename == subject.__file__
                and "_Watchdog" in frame.f_code.co_qualname
            )
            return self if mine else None
        if event == "line":
            self.line += 1
            if self.line == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self


def left() -> tuple[object, ...]:
    """What others would find: handlers, the descriptor to which signals are written, threads."""
    descriptor = signal.set_wakeup_fd(-1)
    threads = [each.name for each in threading.enumerate() if each.name == "parallax-watchdog"]
    return [signal.getsignal(number) for number in subject.handled_signals()], descriptor, threads


def test_phases_are_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_LINE_SECONDS", 0.0)
    with working(Console(file=io.StringIO()), "planning") as work:
        work("measuring block 1 of 3")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "planning: measuring block 1 of 3\n")


def pressed(at: int) -> bool:
    """Whether there was a line number ``at`` before which Ctrl-C came."""
    keyboard, before = Keyboard(at), sys.gettrace()
    sys.settrace(keyboard)
    try:
        with working(Console(file=io.StringIO()), "planning") as work:
            work("building")
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert keyboard.line < at  # it would have been lost
    return False


def test_an_interrupt_at_any_line_leaves_nothing_behind() -> None:
    # A shell's background jobs ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before, lines = left(), 0
        while pressed(lines + 1):
            lines += 1
            assert left() == before, f"line {lines}"
        assert lines > 20
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("number", subject.handled_signals())
def test_requests_are_passed_on(number: signal.Signals) -> None:
    seen = []
    before = signal.signal(number, lambda each, frame: seen.append(each))
    try:
        with working(Console(file=io.StringIO()), "planning"):
            signal.raise_signal(number)
        signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert seen == [number, number]

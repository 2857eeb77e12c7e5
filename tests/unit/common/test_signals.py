"""The first Ctrl-C waits until data structures are consistent."""

from __future__ import annotations

import signal
import threading

import pytest

from parallax.common import signals
from parallax.common.signals import uninterrupted


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_comes_at_the_end() -> None:
    seen = []
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with uninterrupted():
            with uninterrupted():
                press()
            seen.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["all"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_SECONDS", 0.0)
    seen = []
    before = signal.getsignal(signal.SIGINT)

    @uninterrupted()
    def work() -> None:
        press()
        seen.append("once")
        press()
        seen.append("twice")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["once"]
    assert signal.getsignal(signal.SIGINT) is before


def test_two_interrupts_at_once_are_one() -> None:
    """A process that forwards signals sends a second one, which must not interrupt the cleanup of the first."""
    seen = []

    def work() -> None:
        with uninterrupted():
            press()
            press()
            seen.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["all"]


def test_an_interrupt_counts_for_more_than_an_error() -> None:
    def work() -> None:
        with uninterrupted():
            press()
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as found:
        work()
    assert isinstance(found.value.__context__, ValueError)


def test_other_threads_and_other_handlers_are_left_alone() -> None:
    seen = []

    def look() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        look()
    finally:
        signal.signal(signal.SIGINT, before)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_IGN, before]

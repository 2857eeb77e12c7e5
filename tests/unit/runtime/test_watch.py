"""The watch of a rank."""

from __future__ import annotations

import signal
from typing import Any

from parallax.common.signals import handled_signals
from parallax.runtime.failure.heartbeat import NoHeartbeat
from parallax.runtime.failure.watch import Watch
from tests.alone import alone


def around_a_watch() -> list[Any]:
    """Return the signal handlers before a watch, while it watches, and after its end; and the wake-up descriptor."""
    found: list[Any] = [_handlers()]
    watch = Watch.start(lambda report: None, NoHeartbeat())
    found.append(_handlers())
    watch.close()
    return [*found, _handlers(), signal.set_wakeup_fd(-1)]


def _handlers() -> list[str]:
    return [str(signal.getsignal(number)) for number in handled_signals()]


def test_a_closed_watch_leaves_the_signal_handlers_of_before() -> None:
    before, watched, after, descriptor = alone(around_a_watch)
    assert watched != before
    assert (after, descriptor) == (before, -1)

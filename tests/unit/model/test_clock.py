"""The clock that a block's seconds are read from."""

from __future__ import annotations

import builtins
import threading
from typing import Any

import pytest
import torch

from parallax.model.profiling import clock as module
from parallax.model.profiling.clock import Clock


def test_waits_for_other_threads_count_where_threads_work_together() -> None:
    clock, released = Clock(torch.device("cpu")), threading.Event()
    start, processor = clock.elapsed(), clock.now()
    timer = threading.Timer(0.05, released.set)
    timer.start()
    released.wait()
    elapsed = clock.elapsed() - start
    timer.join()
    assert elapsed > clock.now() - processor  # nothing was computed meanwhile


def test_waits_for_a_core_are_unknown_where_the_system_does_not_report_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = builtins.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return plain(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    assert module.queued_seconds() == 0.0
    first = Clock(torch.device("cpu")).elapsed()
    assert Clock(torch.device("cpu")).elapsed() >= first

"""Measurements that take less work: hardly any of these tests is of how long something takes."""

from __future__ import annotations

import pytest

from parallax.model.profiling import clock, timed


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicting caches, and steps of an optimizer over tensors larger than caches, took half of a profile's time."""
    monkeypatch.setattr(clock, "EVICTING_BYTES", 2**16)
    monkeypatch.setattr(timed, "_OPTIMIZED", 1)

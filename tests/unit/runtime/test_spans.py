"""Clocks of actions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallax.machine.device import CpuCopies, Stalls
from parallax.model.describe import describe
from parallax.plan.schedule import Action, Kind
from parallax.runtime.batch import RowsOf, TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.meters import spans
from parallax.runtime.meters.spans import DeviceSpans, HostSpans
from tests.plans import make_plan


class Waiting(CpuCopies):
    """Of copies for which each action waits."""

    stalls = 0

    def take_stalls(self) -> Stalls:
        self.stalls = 0
        return []


def test_stalls_of_an_evaluation_do_not_pile_up() -> None:
    """Two events of the device each, for thousands of micro-batches, were kept for the next training step."""
    copies, action = Waiting(), Action(Kind.FORWARD, 0, 0)
    clock = DeviceSpans(torch.device("cuda", 0), copies).aside()
    for _ in range(3):
        clock.begin()
        assert copies.stalls == 0
        copies.stalls += 1
        clock.end(0, 0, action, 0.0)
    assert len(clock.take()) == 3
    assert type(HostSpans().aside()) is HostSpans


class Clock:
    """A clock that only reading advances."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class SlowRows(RowsOf):
    """Rows whose inputs take a second, and whose targets take three."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(TensorRows(torch.randn(8, 4), torch.arange(8) % 4))
        self._clock = clock

    def inputs(self, start: int, stop: int) -> Any:
        self._clock.now += 1.0
        return self._batch.inputs(start, stop)

    def targets(self, start: int, stop: int) -> Any:
        self._clock.now += 3.0
        return self._batch.targets(start, stop)


@pytest.mark.parametrize("ahead", [False, True])
def test_reading_is_a_wait_of_the_actions_that_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(spans, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    chain = describe(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    plan = make_plan(chain, inputs_ahead=ahead)
    engine = Engine.build(chain, plan, loss=F.cross_entropy, scratch=tmp_path)
    found = engine.step(SlowRows(clock))
    engine.close()
    forwards = [span for span in found.spans if span.kind == "forward"]
    others = [span for span in found.spans if span.kind != "forward"]
    assert len(forwards) == 4
    for span in forwards:
        assert span.read == span.wait == span.end - span.start
    # The first micro-batch also counts the targets of the batch; inputs are read one micro-batch ahead.
    assert max(span.read for span in forwards) == forwards[0].read > forwards[1].read >= 4.0
    assert forwards[-1].read == (3.0 if ahead else 4.0) + forwards[1].read - 4.0
    assert not any(span.read for span in others)
    assert found.read_seconds == (1.0 if ahead else 0.0)
    assert found.input_seconds == clock.now

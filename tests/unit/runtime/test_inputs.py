"""The model's inputs on their way to the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.machine.device import CpuCopies, DoneEvent, Event
from parallax.plan.plan import Directive, StagePlan
from parallax.runtime.inputs import InputsAhead, InputsAtOnce, open_inputs

CPU = torch.device("cpu")
PARTS = [(0, 2), (2, 2), (4, 1)]


class RecordingBatch:
    """A batch that records requests, and has a broken row."""

    def __init__(self, broken: int = -1) -> None:
        self.requested: list[tuple[int, int]] = []
        self._broken = broken

    def __len__(self) -> int:
        return 5

    def inputs(self, start: int, stop: int) -> dict[str, Any]:
        self.requested.append((start, stop))
        if start <= self._broken < stop:
            raise ArithmeticError(f"row {self._broken} is broken")
        return {"x": torch.arange(start, stop), "name": "rows"}

    def targets(self, start: int, stop: int) -> Tensor:
        raise AssertionError("not requested")


def stage(**options: bool) -> StagePlan:
    return StagePlan(start=0, stop=1, replicas=1, directives=(Directive.KEEP,), **options)


def test_one_micro_batch_ahead_where_the_plan_says_so() -> None:
    for options, requested in (({}, [1, 2, 3]), ({"inputs_ahead": True}, [2, 3, 3])):
        inputs, batch = open_inputs([stage(**options)], CPU, CpuCopies()), RecordingBatch()
        for _ in range(2):
            batch.requested.clear()
            inputs.begin(batch, PARTS)
            for part, count in zip(PARTS, requested):
                found = inputs.take(part)
                assert torch.equal(found["x"], torch.arange(part[0], sum(part)))
                assert found["name"] == "rows"
                assert len(batch.requested) == count


@pytest.mark.parametrize("kind", [InputsAtOnce, InputsAhead])
def test_a_failure_is_that_of_its_micro_batch(kind: Any) -> None:
    inputs = (
        InputsAhead(CPU, CpuCopies()) if kind is InputsAhead else InputsAtOnce(CPU, CpuCopies())
    )
    inputs.begin(RecordingBatch(broken=3), PARTS)
    inputs.take(PARTS[0])
    with pytest.raises(ArithmeticError, match="row 3 is broken"):
        inputs.take(PARTS[1])
    inputs.abandon()
    inputs.begin(RecordingBatch(), PARTS)
    assert [len(inputs.take(part)["x"]) for part in PARTS] == [2, 2, 1]


def test_transfers_under_way_when_another_fails_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part holds its target, whose memory may be used by the current computation."""
    waits: list[Tensor] = []

    class Copies(CpuCopies):
        def on_own_streams(self) -> Copies:
            return self

        def copy(self, source: Tensor, target: Tensor, after: Event | None = None) -> Event:
            class Copied(DoneEvent):
                def wait_stream(self, _stream: torch.Stream | None = None) -> None:
                    waits.append(target)

            return Copied()

    def pin(part: Tensor) -> Tensor:
        if part.is_floating_point():
            raise MemoryError("no more of it")
        return part

    class Two(RecordingBatch):
        def inputs(self, start: int, stop: int) -> dict[str, Any]:
            rows = torch.arange(start, stop)
            return {"x": rows, "y": rows / 2}

    monkeypatch.setattr("parallax.runtime.inputs.comes_pinned", lambda part, device: True)
    monkeypatch.setattr("parallax.runtime.inputs.pinned", pin)
    inputs = InputsAhead(CPU, Copies())
    inputs.begin(Two(), PARTS)
    assert [len(target) for target in waits] == [2]
    with pytest.raises(MemoryError):
        inputs.take(PARTS[0])
    inputs.abandon()

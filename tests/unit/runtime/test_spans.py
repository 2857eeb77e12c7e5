"""Clocks of actions."""

from __future__ import annotations

import torch

from parallax.machine.device import CpuCopies, Stalls
from parallax.plan.schedule import Action, Kind
from parallax.runtime.meters.spans import DeviceSpans, HostSpans


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

"""Whose memory it is that rises: a tier's by its own count, or that of the part of the step in which it comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parallax.train.health.memory import BETWEEN, ROWS, STEP, Growth, MemoryAlarm

MIB = 2**20


class Host:
    """A process that grows by so many bytes in each part of a step, and has so many left."""

    def __init__(self, **growing: int) -> None:
        self.growing, self.used = growing, 100 * MIB
        self.tiers = {"the optimizer's states": 10 * MIB}
        self.kept: list[torch.Tensor] = []

    def alarm(self) -> MemoryAlarm:
        return MemoryAlarm(
            lambda: self.tiers,
            torch.device("cpu"),
            2,
            resident=lambda: self.used,
            free=lambda ranks: 1000 * MIB // ranks,
        )

    def trained(self, each: Callable[[], object] = lambda: None) -> list[Growth]:
        alarm, found = self.alarm(), []
        for _ in range(250):
            for part in (BETWEEN, ROWS, STEP):
                self.used += self.growing.get(part, 0)
                alarm.mark(part)
            each()
            if growth := alarm.find_growth():
                found.append(growth)
        return found


@pytest.mark.parametrize(
    ("part", "message"),
    [(ROWS, "the data source keeps"), (STEP, "the model or the loss"), (BETWEEN, "evaluation")],
)
def test_the_part_of_the_step_is_named_once(part: str, message: str) -> None:
    (growth,) = Host(**{part: 3 * MIB}).trained()
    assert message in growth.suspect
    assert growth.bytes_per_step == pytest.approx(3 * MIB, rel=0.01)
    # Of two ranks on this host, each of which is to have its share.
    assert growth.steps_left == pytest.approx(1000 / 3 / 2, rel=0.01)
    assert "resident memory of the host by 3.0 MiB per step, full in 167 steps" in str(growth)


def test_a_tier_that_counts_as_much_is_named() -> None:
    host = Host(step=2 * MIB)

    def each() -> None:
        host.tiers = {"the optimizer's states": host.tiers["the optimizer's states"] + 2 * MIB}

    (growth,) = host.trained(each)
    assert growth.suspect.startswith("the optimizer's states, which grew by ")


def test_accumulating_tensors_are_named_by_their_shape() -> None:
    host = Host(rows=4 * MIB)
    (growth,) = host.trained(lambda: host.kept.append(torch.empty(7, 2**20 // 7)))
    assert growth.suspect.endswith("more of float32 tensors of shape (7, 149796)")


def test_memory_that_stays_raises_none() -> None:
    assert Host().trained() == []
    assert Host(rows=5 * MIB, step=-5 * MIB).trained() == []

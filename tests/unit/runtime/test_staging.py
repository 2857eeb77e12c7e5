"""Buffers of messages are kept and used again, grow by being replaced, and are no larger than they have to be."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from parallax.machine.device import CpuCopies, DoneEvent
from parallax.machine.pinned import Arena, PlainArena
from parallax.runtime.channels.staging import Buffers

KIB = 1024


class Counting(CpuCopies):
    """Knows what it has handed out and not got back."""

    def __init__(self) -> None:
        self.open: list[Arena] = []
        self.made = 0

    def arena(self, count: int) -> Arena:
        copies = self

        class Counted(PlainArena):
            def close(self) -> None:
                copies.open.remove(self)
                super().close()

        self.made += 1
        self.open.append(Counted(count))
        return self.open[-1]

    @property
    def held_bytes(self) -> int:
        return sum(arena.allocated_bytes for arena in self.open)


@dataclass
class Late(DoneEvent):
    """Done when the test sets it."""

    over: bool = field(default=False)

    def done(self) -> bool:
        return self.over


def test_one_buffer_serves_messages_that_follow_each_other() -> None:
    copies = Counting()
    buffers = Buffers(copies)
    for _ in range(100):
        buffers.release([buffers.acquire(100 * KIB)])
    assert copies.made == 1
    buffers.close()
    assert copies.open == []


def test_a_buffer_that_is_still_read_is_not_filled() -> None:
    buffers = Buffers(Counting())
    first, read = buffers.acquire(KIB), Late()
    buffers.release([first], read)
    second = buffers.acquire(KIB)
    assert second.arena is not first.arena
    read.over = True
    assert buffers.acquire(KIB).arena is first.arena


@pytest.mark.parametrize("count", [1, 511, 512, 513, 65 * KIB, 65 * KIB + 1, 3_000_001])
def test_no_power_of_two(count: int) -> None:
    copies = Counting()
    lease = Buffers(copies).acquire(count)
    assert lease.data.numel() == count
    assert copies.held_bytes <= 1.125 * count


def test_messages_of_any_sizes_take_as_many_buffers_as_are_under_way() -> None:
    """Those that are too small are given back, and growing little by little makes few new ones."""
    draw, copies = random.Random(0), Counting()
    buffers = Buffers(copies)
    for number in range(1000):
        under_way = [buffers.acquire(draw.randint(1, 100 * KIB + 100 * number)) for _ in range(3)]
        for place, lease in enumerate(under_way):
            lease.data.fill_(place)
        assert [int(lease.data.max()) for lease in under_way] == [0, 1, 2]
        buffers.release(under_way)
    assert len(copies.open) == 3
    assert copies.held_bytes <= 3 * 1.125 * 200 * KIB
    assert copies.made <= 40


def test_what_came_up_is_the_hosts_on_a_cpu() -> None:
    from parallax.runtime.channels.staging import NoStaging

    data = torch.arange(10, dtype=torch.uint8)
    found, read = NoStaging().device_buffer().upload(data)
    assert found is data
    assert read.done()

"""What a manager says about itself: bytes and seconds by micro-batch, samples, and why tensors stayed."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.machine.device import CpuCopies
from parallax.machine.pinned import PlainArena
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.policy import Policy
from parallax.swap.statistics import MicroStatistics, SwapStatistics
from parallax.swap.stores.store import HostStore
from tests.unit.swap_fakes import KINDS, MIB, ManualStore, settle, storing


def tensor(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.uint8)


def test_each_micro_batch_has_its_bytes() -> None:
    store = ManualStore()
    manager = SwapManager(store, limit_bytes=1000)
    entries = [manager.save(tensor(100 + micro), micro)[0] for micro in (0, 1, 1, 2)]
    store.finish(9)
    manager.load(entries[1])
    manager.load(entries[2])
    found = manager.take_statistics()
    assert {micro: (part.bytes_out, part.bytes_in) for micro, part in found.micro.items()} == {
        0: (100, 0),
        1: (202, 202),
        2: (102, 0),
    }
    assert (found.bytes_out, found.bytes_in, found.limit_bytes) == (404, 202, 1000)
    assert found.stall_seconds == pytest.approx(
        sum(part.stall_seconds for part in found.micro.values())
    )
    assert manager.take_statistics().micro == {}


def test_a_wait_for_memory_counts_for_the_record_that_needs_it() -> None:
    manager = SwapManager(ManualStore(), limit_bytes=100)
    entries = [manager.save(tensor(80), micro)[0] for micro in (0, 1)]
    found = manager.take_statistics()
    assert found.micro[1].stall_seconds == found.stall_seconds > 0
    assert found.micro[0] == MicroStatistics(bytes_out=80)
    del entries


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_are_timed(kind: str, scratch: Path) -> None:
    """Those of files on the thread that works on them, copies by their events; the queue is no transfer."""
    with storing(kind, scratch, delay=lambda: 0.01 if kind == "disk" else 0.0) as (store, _):
        manager = SwapManager(store, limit_bytes=40_000)
        start = time.perf_counter()
        entries = [manager.save(tensor(16_000), 0)[0] for _ in range(6)]
        while entries:
            manager.load(entries.pop())
        settle(manager)
        elapsed = time.perf_counter() - start
        found = manager.take_statistics()
        transfers = (found.bytes_out + found.bytes_in) // 16_000
        assert transfers >= 8
        assert 0 < found.transfer_seconds < elapsed * 8, "no more than all threads together"
        if kind == "disk":
            assert found.transfer_seconds > 0.01 * transfers
        assert 0 <= found.overlap <= 1
        assert manager.stall_seconds == pytest.approx(found.stall_seconds)
        manager.close()


@pytest.mark.parametrize(
    ("transfer", "stall", "overlap"),
    [(0, 0, 1), (0, 5, 1), (4, 1, 0.75), (4, 4, 0), (4, 9, 0), (4, 0, 1)],
)
def test_overlap(transfer: float, stall: float, overlap: float) -> None:
    assert SwapStatistics(transfer_seconds=transfer, stall_seconds=stall).overlap == overlap


def test_samples_follow_every_change() -> None:
    store = ManualStore()
    manager = SwapManager(store, limit_bytes=100_000)
    entries = [manager.save(tensor(5000), 0)[0], manager.save(tensor(3000), 0)[0]]
    store.finish(9)
    del entries
    samples = manager.take_statistics().samples
    levels = [(device, tier) for _, device, tier in samples]
    assert levels[0] == (5000, 0)
    assert (8000, 8192 + 4096) in levels
    assert levels[-1] == (0, 0)
    times = [seconds for seconds, _, _ in samples]
    assert times == sorted(times)
    assert times[-1] <= time.perf_counter()


def test_samples_are_thinned() -> None:
    statistics = SwapStatistics()
    for i in range(100_000):
        statistics.sample(float(i), i, -i)
    assert 1000 <= len(statistics.samples) < 2000
    assert len({b[0] - a[0] for a, b in itertools.pairwise(statistics.samples)}) == 1, "unevenly"


class Kinds(nn.Module):
    """Saves one tensor of every kind that stays, and one that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.layer(x))  # moves
        scale = (hidden[:1, :2] * 1).exp()  # small
        cast = F.linear(hidden.double(), self.layer.weight.double())  # a cast of a parameter
        return (cast * hidden).sum() * scale.sum() + (hidden * hidden).sum()


def test_decisions_say_why(scratch: Path) -> None:
    model, data = Kinds(), torch.randn(5000, 64)
    with storing("disk", scratch) as (store, _):
        manager = SwapManager(store, limit_bytes=MIB)
        with offloading(manager, Selector([*model.parameters()], minimum_bytes=1000), 0):
            loss = model(data[:50])
        found = manager.take_statistics().decisions
        loss.backward()
        manager.close()
    assert found["moved"][1] >= 50 * 64 * 4
    assert found["small part of a batch"] == (1, 50 * 64 * 4)
    assert found["view or cast of a parameter"][1] >= 64 * 64 * 8
    assert found["smaller than swap.minimum_bytes"][0] >= 1
    assert found["shares memory with another"][0] >= 1
    assert all(count > 0 for count, _ in found.values())


@pytest.mark.parametrize(
    ("reason", "saved"), [("parameter or buffer", 0), ("not plain strided memory", 1)]
)
def test_reasons_of_single_tensors(reason: str, saved: int) -> None:
    held = torch.randn(1000)
    tensors = [held[10:], torch.randn(1000, dtype=torch.cfloat).conj()]
    assert Selector([held], minimum_bytes=1).why_kept(tensors[saved]) == reason
    assert not Selector([held], minimum_bytes=1).moves(tensors[saved])


def test_what_was_kept_is_decided_when_it_is_known() -> None:
    store = ManualStore()
    manager = SwapManager(store, limit_bytes=100, policy=Policy(eager=False))
    entries = [manager.save(tensor(60), 0)[0]]
    assert manager.take_statistics().decisions == {}
    entries.append(manager.save(tensor(60), 0)[0])
    assert manager.take_statistics().decisions == {"moved": (1, 60)}
    manager.load(entries.pop())
    assert manager.take_statistics().decisions == {"kept within the limit": (1, 60)}
    entries.clear()
    assert manager.take_statistics().decisions == {}


def test_pinned_memory_beyond_the_request_is_reported() -> None:
    class Rounding(CpuCopies):
        def arena(self, count: int) -> PlainArena:
            found = PlainArena(count)
            found.allocated_bytes = count + 96
            return found

    manager = SwapManager(HostStore(1000, Rounding()), limit_bytes=10)
    assert manager.take_statistics().pinned_waste_bytes == 96
    manager.close()

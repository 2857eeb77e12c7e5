"""Places of sizes that differ from step to step: the line that holds them stays bounded, and nothing is lost."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import parallax
from parallax.errors import SwapError
from parallax.machine.device import CpuCopies
from parallax.swap.stores.slots import SlotMap, StoreSlot
from parallax.swap.stores.store import DiskStore, HostStore, Store

MIB = 2**20
PAGE = 4096
LONGEST = 1.25  # times the most bytes that were in use


def places(slot: StoreSlot) -> list[tuple[int, int]]:
    return list(slot.parts(0, slot.size))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * PAGE)), max_size=150))
def test_the_line_is_bounded_by_what_was_in_use(requested: list[tuple[bool, int]]) -> None:
    slots, taken, most = SlotMap(2**40, "the tier"), list[StoreSlot](), 0
    for give, size in requested:
        if give and taken:
            slots.release(taken.pop(size % len(taken)))
        else:
            taken.append(slots.allocate(size))
        most = max(most, slots.used_bytes)
        found = sorted(place for slot in taken for place in places(slot))
        assert sum(size for _, size in found) == sum(slot.size for slot in taken)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(found))
        assert max((offset + size for offset, size in found), default=0) <= LONGEST * most


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * PAGE)), max_size=150))
def test_a_tier_is_full_only_when_its_bytes_are_in_use(requested: list[tuple[bool, int]]) -> None:
    capacity = 20 * PAGE
    slots, taken = SlotMap(capacity, "the tier"), list[StoreSlot]()
    for give, size in requested:
        if give and taken:
            slots.release(taken.pop(size % len(taken)))
            continue
        pages = -(-size // PAGE)
        fits = slots.used_bytes + pages * PAGE <= capacity
        try:
            taken.append(slots.allocate(size))
            assert fits
        except SwapError:
            assert not fits


def test_parts_of_a_place_in_several_stretches() -> None:
    slot = StoreSlot(100, 25, ((100, 10), (0, 10), (50, 10)))
    assert list(slot.parts(0, 25)) == [(100, 10), (0, 10), (50, 5)]
    assert list(slot.parts(8, 4)) == [(108, 2), (0, 2)]
    assert list(slot.parts(20, 5)) == [(50, 5)]
    assert list(StoreSlot(7, 9).parts(2, 3)) == [(9, 3)]


@pytest.fixture(params=["disk", "host", "slabs"])
def store(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Store]:
    kinds: dict[str, Callable[[], Store]] = {
        "disk": lambda: DiskStore(scratch, 6 * PAGE, CpuCopies(), threads=1),
        "host": lambda: HostStore(6 * PAGE, CpuCopies()),
        "slabs": lambda: HostStore(6 * PAGE, CpuCopies(), slab_bytes=PAGE * 3 // 2),
    }
    found = kinds[request.param]()
    yield found
    found.close()


def noise(size: int, seed: int) -> Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_bytes_in_several_stretches_come_back(store: Store) -> None:
    """Every second page is free: no stretch of two is."""
    written = [store.write(noise(PAGE, seed)) for seed in range(6)]
    for number, (slot, pending) in enumerate(written):
        pending.wait()
        if number % 2:
            store.free(slot)
    data = noise(3 * PAGE - 5, 6)
    slot, pending = store.write(data)
    pending.wait()
    assert pending.done()
    assert pending.seconds() >= 0
    assert len(slot.stretches) == 3
    target = torch.zeros_like(data)
    store.read(slot, target).wait()
    assert torch.equal(target, data)
    for number in (0, 2, 4):
        target = torch.zeros(PAGE, dtype=torch.uint8)
        store.read(written[number][0], target).wait()
        assert torch.equal(target, noise(PAGE, number))
    with pytest.raises(SwapError, match="is full"):
        store.write(noise(1, 0))


class Sequences(nn.Module):
    """Layers over rows of any number; one keeps what it saved for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64 + 16 * n) for n in range(4))
        self.backs = nn.ModuleList(nn.Linear(64 + 16 * n, 64) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, back in zip(self.layers, self.backs):
            x = x + back(F.gelu(layer(x)))
        return x


def swap_files() -> list[int]:
    """Sizes of the unlinked files of this process."""
    found = []
    for handle in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:
            continue
        if "parallax-swap-" in name:
            found.append(os.fstat(int(handle)).st_size)
    return found


@pytest.mark.slow
def test_random_lengths_for_hundreds_of_steps(scratch: Path) -> None:
    """States are always offloaded and some graphs outlive their step, so the line never restarts."""
    torch.manual_seed(0)
    model, lengths = Sequences(), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters())
    limit = 2 * sum(p.nbytes for p in model.parameters()) + MIB // 2
    options = {"minimum_bytes": 1024, "piece_bytes": 64 * 1024, "directory": scratch}
    alive: list[Tensor] = []
    with parallax.swap(model, limit, optimizer=optimizer, **options) as swapping:
        for step in range(200):
            rows = lengths.choice([lengths.randint(8, 64), lengths.randint(64, 300)])
            loss = model(torch.randn(rows, 64)).square().mean()
            loss.backward()
            alive = [model(torch.randn(rows // 3, 64))] if step % 3 == 0 else alive
            optimizer.step()
            optimizer.zero_grad()
        (size,) = swap_files()
        most = swapping.statistics.tier_high_water
        alive.clear()
    assert swapping.statistics.bytes_out > 20 * MIB
    assert swapping.states[0].bytes_out > 5 * MIB
    assert size <= LONGEST * most

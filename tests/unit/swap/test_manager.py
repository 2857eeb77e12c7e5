"""The swap manager's bookkeeping, on a store whose transfers end when the test says so."""

from __future__ import annotations

import gc
import random
import re
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallax.errors import BudgetExceeded, SwapError
from parallax.machine.device import CpuCopies
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.records import Entry
from parallax.swap.stores.store import DiskStore
from tests.unit.swap_fakes import ManualStore

KIB = 1024


def tensor(size: int, value: int = 1) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def values(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@pytest.fixture
def store() -> ManualStore:
    return ManualStore()


def test_back_pressure_waits_for_the_oldest_write(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100 * KIB)
    entries = [manager.save(tensor(40 * KIB, i), 0)[0] for i in range(2)]
    assert store.log == []
    entries.append(manager.save(tensor(60 * KIB, 2), 0)[0])
    assert store.log == [f"write {40 * KIB}"]
    assert manager.resident_bytes == 100 * KIB
    statistics = manager.take_statistics()
    assert statistics.high_water == 100 * KIB
    assert statistics.stall_seconds > 0


def test_high_water_never_passes_the_limit(scratch: Path) -> None:
    generator = random.Random(0)
    disk = DiskStore(scratch, 2**30, CpuCopies(), threads=3)
    manager = SwapManager(disk, limit_bytes=200 * KIB)
    entries = [
        manager.save(tensor(generator.randint(1, 100 * KIB), i % 251), i % 4)[0] for i in range(300)
    ]
    for micro in (2, 0, 3, 1):
        manager.fetch(micro)
        for i in reversed(range(micro, 300, 4)):
            assert values(manager.load(entries[i])).eq(i % 251).all()
            entries[i] = None  # type: ignore[call-overload]
    statistics = manager.take_statistics()
    assert 100 * KIB < statistics.high_water <= 200 * KIB
    assert statistics.bytes_in <= statistics.bytes_out
    assert manager.resident_bytes == manager.stored_bytes == 0
    manager.close()


def test_budget_exceeded_carries_the_arithmetic(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100 * KIB)
    first, second = manager.save(tensor(64 * KIB), 0)[0], manager.save(tensor(64 * KIB), 0)[0]
    store.finish(9)
    held = manager.load(first)
    expected = re.escape(
        "may hold 100.0 KiB of offloaded activations; 64.0 KiB are in use by the running backward "
        "and 64.0 KiB more are needed"
    )
    with pytest.raises(BudgetExceeded, match=expected):
        manager.load(second)
    with pytest.raises(
        BudgetExceeded, match=r"101\.0 KiB more are needed: raise cluster\.device_memory"
    ):
        manager.save(tensor(101 * KIB), 0)[0]
    del held
    assert values(manager.load(second)).eq(1).all()
    assert manager.take_statistics().high_water <= 100 * KIB


def test_used_bytes_are_evicted_only_when_unused(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100 * KIB)
    entries = [manager.save(tensor(40 * KIB, i), 0)[0] for i in range(4)]
    store.finish(9)
    running = [manager.load(entries[0]), manager.load(entries[1])]
    with pytest.raises(BudgetExceeded):
        manager.load(entries[2])
    assert manager.resident_bytes == 80 * KIB
    del running[0]
    assert values(manager.load(entries[2])).eq(2).all()
    assert values(running[0]).eq(1).all()


def test_last_saved_comes_first_as_far_as_it_fits(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100)
    entries = [
        manager.save(tensor(size), micro)[0] for size, micro in [(31, 0), (32, 0), (33, 0), (34, 1)]
    ]
    store.finish(9)
    store.log.clear()
    manager.fetch(0)
    manager.fetch(1)
    store.finish(9)
    assert store.log == ["read 33", "read 32", "read 31"]
    used = entries.pop(2)
    manager.load(used)
    store.finish(9)
    assert store.log[3:] == []  # the next does not fit while the first is in use
    del used
    manager.fetch(0)
    store.finish(9)
    assert store.log[3:] == ["read 34"]  # and what is loaded is not read again


def test_kept_before_the_write_and_evicted_when_memory_is_needed(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100)
    spared = [manager.save(tensor(40, 7), 0)[0], manager.save(tensor(20, 8), 0)[0]]
    manager.fetch(0)
    statistics = manager.take_statistics()
    assert (statistics.bytes_cancelled, statistics.bytes_out) == (60, 0)
    assert manager.stored_bytes == 0
    more = manager.save(tensor(60, 9), 1)[
        0
    ]  # needs memory: the one needed last is evicted after all
    assert store.log == ["write 40"]
    assert manager.resident_bytes == 80
    for entry, value in [(spared[1], 8), (spared[0], 7), (more, 9)]:
        assert values(manager.load(entry)).eq(value).all()
    del spared, more, entry
    assert manager.resident_bytes == manager.stored_bytes == 0


def test_fetched_while_being_written(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100)
    entry = manager.save(tensor(60, 5), 0)[0]
    store.transfers[0].running = True
    manager.fetch(0)
    store.finish(1)
    assert manager.resident_bytes == 60  # wanted, so it stays although it is written
    other = manager.save(tensor(60, 6), 1)[0]  # no write is needed to free memory for it
    assert store.log == ["write 60"]
    assert values(manager.load(entry)).eq(5).all()
    assert values(manager.load(other)).eq(6).all()


def test_a_place_is_not_reused_while_its_transfer_runs(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100)
    dead = manager.save(tensor(60, 1), 0)[0]
    store.transfers[0].running = True
    watch = weakref.ref(dead.record.storage)
    del dead
    assert manager.resident_bytes == 60, "the bytes are still being read by the writer"
    assert manager.stored_bytes > 0
    assert watch() is not None, "a device could give the block to someone else"
    # Waits for the dead one's write, and only then takes its place.
    entry = manager.save(tensor(60, 2), 0)[0]
    store.finish(9)
    assert values(manager.load(entry)).eq(2).all()
    assert watch() is None


def test_dead_before_the_write_began(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100)
    del_me = manager.save(tensor(60), 0)[0]
    del del_me
    assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)
    store.finish(9)
    assert store.log == []
    assert manager.take_statistics().bytes_cancelled == 60


def test_a_failed_write_is_reported_and_stays_reported(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100)
    entry = manager.save(tensor(60), 0)[0]
    store.transfers[0].error = SwapError("no space")
    store.finish(1)
    for _ in range(2):
        with pytest.raises(SwapError, match="no space"):
            manager.save(tensor(10), 0)[0]
        with pytest.raises(SwapError, match="no space"):
            manager.load(entry)
        assert manager.resident_bytes == 60
    del entry
    assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)
    manager.save(tensor(10), 0)[0]


def test_a_failed_transfer_of_a_freed_record_is_ignored(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100)
    dead = manager.save(tensor(60), 0)[0]
    store.transfers[0].error, store.transfers[0].running = SwapError("no space"), True
    del dead
    entry = manager.save(tensor(60), 0)[0]
    assert manager.resident_bytes == 60
    del entry
    assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)


def test_a_failed_read_is_reported_each_time(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100)
    entry = manager.save(tensor(60), 0)[0]
    store.finish(1)
    manager.fetch(0)
    manager.take_statistics()
    store.transfers[0].error = SwapError("bad sector")
    for _ in range(2):
        with pytest.raises(SwapError, match="bad sector"):
            manager.load(entry)
    assert manager.take_statistics().bytes_in == 0


def test_a_full_tier_leaves_no_trace() -> None:
    manager = SwapManager(ManualStore(capacity=8192), limit_bytes=100 * KIB)
    entry = manager.save(tensor(8000), 0)[0]
    with pytest.raises(SwapError, match=r"8\.0 KiB in use of 8\.0 KiB, 7\.8 KiB more requested"):
        manager.save(tensor(8000), 0)[0]
    assert manager.resident_bytes == 8000
    del entry
    assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)


@pytest.mark.parametrize("running", [False, True])
def test_close_with_transfers_under_way(store: ManualStore, running: bool) -> None:
    manager = SwapManager(store, limit_bytes=200)
    stored, reading = manager.save(tensor(40), 0)[0], manager.save(tensor(40), 1)[0]
    store.finish(9)
    manager.fetch(1)
    queued = manager.save(tensor(40, 3), 0)[0]
    store.transfers[-1].running = running
    manager.close()
    manager.close()
    assert values(manager.load(queued)).eq(3).all()
    with pytest.raises(SwapError, match="closed"):
        manager.load(stored)
    with pytest.raises(SwapError, match="closed"):
        manager.save(tensor(1), 0)[0]
    with pytest.raises(SwapError, match="closed"):
        manager.fetch(0)
    del stored, reading, queued
    assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)


def test_statistics_restart(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100 * KIB)
    entry = manager.save(tensor(60 * KIB), 0)[0]
    store.finish(1)
    manager.load(entry)
    first = manager.take_statistics()
    assert (first.bytes_out, first.bytes_in, first.high_water) == (60 * KIB, 60 * KIB, 60 * KIB)
    assert first.tier_high_water == 60 * KIB
    del entry
    manager.take_statistics()
    second = manager.take_statistics()
    assert (second.bytes_out, second.bytes_in, second.high_water, second.tier_high_water) == (
        0,
        0,
        0,
        0,
    )


def test_books_do_not_grow(store: ManualStore) -> None:
    manager = SwapManager(store, limit_bytes=100 * KIB)
    for step in range(200):
        entries = [manager.save(tensor(1 + step + i), i)[0] for i in range(5)]
        store.finish(step % 4)
        manager.fetch(step % 5)
        del entries
    assert manager.resident_bytes == 0
    accounts = [book for book in vars(manager).values() if hasattr(book, "__len__")]
    assert sum(len(book) for book in accounts) < 10


def test_claims_end_on_any_thread(scratch: Path) -> None:
    manager = SwapManager(DiskStore(scratch, 2**30, CpuCopies(), threads=2), limit_bytes=64 * KIB)
    problems = []

    def churn(seed: int) -> None:
        generator = random.Random(seed)
        held: list[tuple[Entry, int]] = []
        try:
            for _ in range(600):
                value = generator.randrange(251)
                held.append(
                    (manager.save(tensor(generator.randint(1, 8 * KIB), value), seed)[0], value)
                )
                if generator.random() < 0.5:
                    entry, value = held.pop(generator.randrange(len(held)))
                    assert values(manager.load(entry)).eq(value).all()
                if generator.random() < 0.2:
                    manager.fetch(seed)
                if len(held) > 20:
                    held.clear()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert problems == []
    gc.collect()
    while manager.resident_bytes:
        time.sleep(0.001)
    assert manager.stored_bytes == 0
    manager.close()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(0, 2)),
        st.tuples(st.just("fetch"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("load"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("finish"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("start"), st.integers(0, 4), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", ["manual", "disk"])
@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS, limit=st.integers(60, 200))
def test_any_order_of_calls_gives_back_what_was_saved(
    kind: str, operations: list[tuple[str, int, int]], limit: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "swap"
        store = (
            ManualStore() if kind == "manual" else DiskStore(path, 2**24, CpuCopies(), threads=2)
        )
        manager = SwapManager(store, limit_bytes=limit)
        try:
            check_any_order(manager, store, operations, limit)
        finally:
            manager.close()


def check_any_order(
    manager: SwapManager,
    store: ManualStore | DiskStore,
    operations: list[tuple[str, int, int]],
    limit: int,
) -> None:
    expected: dict[Entry, int] = {}
    high_water = 0
    for count, (name, a, b) in enumerate(operations):
        alive = list(expected)
        if name == "add":
            expected[manager.save(tensor(a, count), b)[0]] = count
        elif name == "fetch":
            manager.fetch(a)
        elif name == "load" and alive:
            entry = alive[a % len(alive)]
            assert values(manager.load(entry)).eq(expected[entry]).all()
        elif name == "drop" and alive:
            del expected[alive[a % len(alive)]]
        elif isinstance(store, ManualStore) and name == "finish":
            store.finish(a)
        elif isinstance(store, ManualStore) and name == "start" and store.transfers:
            store.transfers[a % len(store.transfers)].running = True
        entry = alive = None  # type: ignore[assignment]
        assert manager.resident_bytes <= limit
        high_water = max(high_water, manager.resident_bytes)
    for entry, value in expected.items():
        assert values(manager.load(entry)).eq(value).all()
    expected.clear()
    entry = None  # type: ignore[assignment]
    while manager.resident_bytes:
        store.finish(99) if isinstance(store, ManualStore) else time.sleep(0)
    statistics = manager.take_statistics()
    assert high_water <= statistics.high_water <= limit
    assert manager.stored_bytes == 0
    if isinstance(store, ManualStore):
        assert (statistics.bytes_out, statistics.bytes_in) == (store.bytes_out, store.bytes_in)

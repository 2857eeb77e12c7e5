"""Pinned memory as CUDA's runtime sees it: which calls are made, with which bytes. The calls themselves need a GPU."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parallax.errors import SwapError
from parallax.machine.accelerators import accelerator_named
from parallax.machine.device import CpuCopies, StagingRing, copies_for
from parallax.machine.pinned import PINNING_REMEDY, Arena, PlainArena, RegisteredArena
from parallax.swap.stores.store import DiskStore
from tests.unit.swap_fakes import MIB, LateCopies


class Runtime:
    """Keeps account of registered ranges like cudart."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered, self.most = code, dict[int, int](), 0
        self.current = 0
        self.waits: list[
            int
        ] = []  # ranges that were registered when somebody waited for the device

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == count % mmap.PAGESIZE == 0
        assert flags == 1
        assert self.current == OTHER.index, "it would make a context on another device"
        if not self.code:
            self.registered[address] = count
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert self.current == OTHER.index
        del self.registered[address]
        return 0


OTHER = torch.device("cuda", 1)  # than the current one


def pin(runtime: Runtime, count: int, monkeypatch: pytest.MonkeyPatch) -> Arena:
    """As on a CUDA device that is not the current one."""

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        before, runtime.current = runtime.current, device.index
        yield
        runtime.current = before

    def synchronize(device: torch.device) -> None:
        assert device == OTHER
        runtime.waits.append(len(runtime.registered))

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    return accelerator_named("cuda").arena(OTHER, count, PINNING_REMEDY)


def test_what_a_failed_owner_leaves_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    arena = pin(runtime, 3 * MIB, monkeypatch)
    assert runtime.registered
    del arena
    gc.collect()
    assert runtime.waits == [1], "a copy may have been under way"
    assert not runtime.registered


def test_what_a_failed_device_leaves_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    runtime = Runtime()
    arena = pin(runtime, MIB, monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    del arena
    gc.collect()
    assert not runtime.registered


def test_pages_are_touched_by_threads_near_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: requested.append(set(cpus)))
    monkeypatch.setattr("parallax.machine.pinned.usable_cores", lambda: 3.0)
    pinned = RegisteredArena(
        9 * MIB + 5, lambda *_: 0, lambda _: 0, synchronize=lambda: None, cpus={1, 2}
    )
    assert requested == [{1, 2}] * 3
    assert not pinned.data.any()
    pinned.close()


@pytest.mark.parametrize("count", [1, 4096, 4097, 100_000_007])
def test_an_arena_is_as_large_as_requested(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    arena = pin(runtime, count, monkeypatch)
    assert arena.data.numel() == count
    assert list(runtime.registered.values()) == [arena.allocated_bytes]
    assert 0 <= arena.allocated_bytes - count < mmap.PAGESIZE
    arena.data[-1] = 7
    view, watch = arena.data[-1:], weakref.ref(arena.data.untyped_storage())
    arena.close()
    arena.close()
    assert runtime.registered == {}
    assert not runtime.waits, "who closes it has waited"
    assert view.item() == 7, "the pages stay with the last view"
    del view
    gc.collect()
    assert watch() is None


def test_memory_that_cannot_be_pinned_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SwapError,
        match=r"cannot pin 1\.0 MiB .*: error 2 of the device's runtime; lower cluster\.host_memory, .*ulimit -l",
    ):
        pin(Runtime(code=2), MIB, monkeypatch)
    with pytest.raises(
        SwapError, match=r"cannot allocate .* of host memory: .*; lower cluster\.host_memory"
    ):
        pin(Runtime(), 2**60, monkeypatch)


def test_no_host_memory_is_allocated_after_the_store_was_made(scratch: Path) -> None:
    """3 ms for each tensor, and up to twice its bytes, where every transfer pinned its own."""

    class Counting(LateCopies):
        requested = 0

        def arena(self, count: int) -> PlainArena:
            self.requested += 1
            return PlainArena(count)

    copies = Counting()
    store = DiskStore(scratch, 64 * MIB, copies, threads=2)
    for seed in range(20):
        data = torch.randint(0, 256, (10_000 + seed,), dtype=torch.uint8)
        slot, written = store.write(data)
        written.wait()
        target = torch.zeros_like(data)
        read = store.read(slot, target)
        read.wait()
        assert torch.equal(data, target)
        assert read.done()
        store.free(slot)
    store.close()
    copies.close()
    assert copies.requested == 1
    assert store.waste_bytes == 0


def test_a_buffer_comes_back_whatever_happens() -> None:
    copies = LateCopies()
    ring = StagingRing(copies, torch.device("cpu"), 1, 100)
    data, done = torch.arange(250, dtype=torch.uint8), copies.mark()
    for _ in range(3):
        pieces = ring.to_host(data, done)
        next(pieces)
        del pieces  # as an exception in the loop does
    assert torch.cat([piece.clone() for piece in ring.to_host(data, done)]).equal(data)
    target = torch.zeros_like(data)
    for at, piece in enumerate(ring.to_device(target, done)):
        piece.copy_(data[100 * at : 100 * at + 100])
    assert torch.equal(target, data)
    ring.close()
    copies.close()


def test_the_cpu_has_no_copies_of_its_own() -> None:
    copies = copies_for(torch.device("cpu"))
    assert isinstance(copies, CpuCopies)
    data = torch.arange(10, dtype=torch.uint8)
    (piece,) = copies.file_staging(4, 100).to_host(data, copies.mark())
    assert piece.data_ptr() == data.data_ptr()
    event = copies.copy(data, torch.zeros_like(data))
    assert event.done()
    assert event.seconds() >= 0
    assert copies.mark().seconds() == 0


def test_a_forked_child_has_none_of_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel copied all of it for each worker of a loader that was forked."""
    arena = pin(Runtime(), 64 * MIB, monkeypatch)
    arena.data.fill_(7)
    view = arena.data.numpy()
    before = psutil.Process().memory_info().rss
    child = os.fork()
    if not child:
        held = psutil.Process().memory_info().rss
        os._exit(0 if held < before - 60 * MIB and not view.any() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (view == 7).all()
    arena.close()

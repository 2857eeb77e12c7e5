"""Tiers: places, files, directories, and what goes wrong with them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import stat
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parallax.errors import SwapError
from parallax.machine.device import CpuCopies
from parallax.machine.pinned import PlainArena
from parallax.swap.activations.manager import SwapManager
from parallax.swap.config import SwapConfig
from parallax.swap.stores.slots import SlotMap, StoreSlot
from parallax.swap.stores.store import DiskStore, HostStore, Store
from tests.alone import alone
from tests.unit.swap_fakes import MIB, save, settle

PAGE = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * PAGE)), max_size=80))
def test_places_never_overlap_and_none_is_lost(requested: list[tuple[bool, int]]) -> None:
    capacity = 40 * PAGE
    slots, taken = SlotMap(capacity, "the tier"), list[StoreSlot]()
    for give, size in requested:
        if give and taken:
            slots.release(taken.pop(size % len(taken)))
        else:
            try:
                taken.append(slots.allocate(size))
            except SwapError:
                assert slots.used_bytes + size > capacity - PAGE, "refused although bytes were free"
        places = [place for slot in taken for place in slot.stretches or [(slot.offset, slot.size)]]
        spans = sorted((offset, offset + length) for offset, length in places)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= capacity
    for slot in taken:
        slots.release(slot)
    assert slots.used_bytes == 0
    assert slots.allocate(capacity).offset == 0


def test_the_same_sizes_again_need_no_growth() -> None:
    slots = SlotMap(2**40, "the tier")
    for _ in range(5):
        taken = [slots.allocate(size) for size in (5000, 9000, 5000, 100)]
        assert max(slot.offset for slot in taken) < 8 * PAGE
        for slot in taken:
            slots.release(slot)


def test_new_sizes_fit_between_places_in_use() -> None:
    slots = SlotMap(100 * PAGE, "the tier")
    taken = [slots.allocate(10 * PAGE) for _ in range(10)]
    for slot in taken[1:9]:
        slots.release(slot)
    offsets = [
        slots.allocate(40 * PAGE).offset,
        slots.allocate(3 * PAGE).offset,
        slots.allocate(37 * PAGE).offset,
    ]
    assert offsets == [10 * PAGE, 50 * PAGE, 53 * PAGE]
    with pytest.raises(SwapError, match=r"400\.0 KiB in use of 400\.0 KiB"):
        slots.allocate(1)


@pytest.fixture(params=["disk", "host", "slabs"])
def store(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Store]:
    slab_bytes = 5 * MIB if request.param == "slabs" else 0
    found: Store = (
        disk(scratch)
        if request.param == "disk"
        else HostStore(64 * MIB, CpuCopies(), slab_bytes=slab_bytes)
    )
    yield found
    found.close()


def disk(folder: Path, capacity: int = 64 * MIB, threads: int = 2) -> DiskStore:
    return DiskStore(folder, capacity, CpuCopies(), threads=threads)


def noise(size: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, PAGE, PAGE + 1, 20 * MIB + 7])
def test_round_trip(store: Store, size: int) -> None:
    written = []
    for seed in range(2):
        data = noise(size, seed)
        slot, pending = store.write(data)
        pending.wait()
        assert pending.done()
        written.append((slot, data))
    for slot, data in written:
        target = torch.zeros_like(data)
        store.read(slot, target).wait()
        assert torch.equal(target, data)
        store.free(slot)
    assert store.slots.used_bytes == 0


class Gate:
    """Holds every write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened, self.waiting, real = threading.Event(), threading.Semaphore(0), os.pwrite

        def pwrite(handle: int, view: memoryview, offset: int) -> int:
            self.waiting.release()
            assert self._opened.wait(10)
            return real(handle, view, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)

    def open(self) -> None:
        self._opened.set()


def test_a_cancelled_write_lets_go_at_once(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of the worker threads once kept the tensor until it was its turn."""
    store, gate = disk(scratch, threads=1), Gate(monkeypatch)
    _, first = store.write(noise(100))
    gate.waiting.acquire(timeout=10)
    data = noise(100)
    watch = weakref.ref(data.untyped_storage())
    _, second = store.write(data)
    del data
    assert not first.cancel()
    assert second.cancel()
    assert watch() is None
    gate.open()
    first.wait()
    store.close()


def test_a_read_does_not_wait_for_writes(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = disk(scratch), noise(100)
    slot, pending = store.write(data)
    pending.wait()
    gate = Gate(monkeypatch)
    writes = [store.write(noise(100))[1] for _ in range(5)]
    target = torch.zeros_like(data)
    store.read(slot, target).wait()
    assert torch.equal(target, data)
    assert not any(write.done() for write in writes)
    gate.open()
    store.close()


def test_close_ends_threads_and_files(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    store, gate = disk(scratch, threads=1), Gate(monkeypatch)
    _, running = store.write(noise(100))
    gate.waiting.acquire(timeout=10)
    _, queued = store.write(noise(100))
    gate.open()
    store.close()
    store.close()
    running.wait()
    with contextlib.suppress(SwapError):  # dropped, unless the thread was faster than close()
        queued.wait()
    assert queued.cancel() or queued.done()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


# ------------------------------------------------------------------------------------------ full and broken


def test_a_full_tier_says_what_is_used(scratch: Path) -> None:
    store = disk(scratch, capacity=10 * PAGE)
    store.write(noise(8 * PAGE))
    with pytest.raises(
        SwapError,
        match=r"disk tier in .*swap is full: 32\.0 KiB in use of 40\.0 KiB, 12\.0 KiB more",
    ):
        store.write(noise(3 * PAGE))
    store.close()


@pytest.mark.parametrize("verb", ["write", "read"])
def test_an_io_error_names_path_bytes_and_cause(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    store = disk(scratch)
    slot, pending = store.write(noise(3 * MIB))
    pending.wait()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite" if verb == "write" else "preadv", fail)
    pending = (
        store.write(noise(3 * MIB))[1] if verb == "write" else store.read(slot, noise(3 * MIB))
    )
    for _ in range(2):
        with pytest.raises(
            SwapError,
            match=rf"cannot {verb} 3\.0 MiB of swapped data in {scratch}: Input/output error",
        ):
            pending.wait()
    with pytest.raises(SwapError):
        pending.done()
    store.close()


def test_a_truncated_file_is_never_stale_data(scratch: Path) -> None:
    store = disk(scratch)
    slot, pending = store.write(noise(3 * MIB))
    pending.wait()
    os.ftruncate(store._file, MIB)
    with pytest.raises(SwapError, match=r"ends 2\.0 MiB too early"):
        store.read(slot, noise(3 * MIB)).wait()
    store.close()


@pytest.mark.parametrize("size", [3 * MIB, 3 * MIB + 5])
@pytest.mark.parametrize("damage", ["flipped bit", "flipped bit at the end", "hole"])
def test_a_damaged_file_is_never_stale_data(scratch: Path, size: int, damage: str) -> None:
    store = disk(scratch)
    slot, pending = store.write(noise(size))
    pending.wait()
    if damage == "hole":
        os.ftruncate(store._file, MIB)
        os.ftruncate(store._file, size)
    else:
        at = size - 1 if damage.endswith("end") else 1234567
        (byte,) = os.pread(store._file, 1, at)
        os.pwrite(store._file, bytes([byte ^ 16]), at)
    with pytest.raises(
        SwapError, match=r"3\.0 MiB at byte 0 of the swap file in .*swap are not what was written"
    ):
        store.read(slot, noise(size)).wait()
    store.close()


def fails_and_recovers(folder: Path) -> str:
    """The message of a step on a disk that is full; then everything is let go of, and a small step works."""
    message = ""
    with contextlib.closing(SwapManager(disk(folder), limit_bytes=8 * MIB)) as manager:
        try:
            kept = [save(manager, torch.ones(MIB)) for _ in range(8)]
        except SwapError as error:
            message = str(error)
        kept = []
        assert kept == []
        settle(manager)  # the other thread's write, which had begun, is let end
        assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)
        root = save(manager, torch.full((1000,), 3.0))
        root.backward()
    return message


def limited(scratch: Path) -> str:
    """In a process of its own."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MIB, 6 * MIB))
    return fails_and_recovers(scratch)


def test_a_file_size_limit_fails_with_path_and_bytes(scratch: Path) -> None:
    message = alone(limited, scratch)
    assert f"cannot write 4.0 MiB of swapped data in {scratch}: File too large; " in message


def test_a_full_disk_fails_with_path_and_bytes(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(mounted)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        message = fails_and_recovers(mounted / "swap")
    finally:
        # Lazily: a process that another test has just forked may hold the files for a moment longer.
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)
    assert (
        f"cannot write 4.0 MiB of swapped data in {mounted}/swap: No space left on device; "
        in message
    )


# ----------------------------------------------------------------------------------------------- directories


def test_only_the_owner_can_enter_and_nothing_is_left_over(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "swap"
    store = disk(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []
    found = os.fstat(store._file)
    assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
    store.close()


def test_an_open_directory_of_its_own_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    folder.mkdir(mode=0o755)
    left = folder / "parallax-swap-0123"
    left.write_text("killed before it could unlink")
    disk(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not left.exists()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SwapError, match=r"link is a symbolic link: set swap\.directory"):
        disk(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SwapError, match="dangling is a symbolic link"):
        disk(tmp_path / "dangling")
    assert not (tmp_path / "nowhere").exists()


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(SwapError, match=r"is another user's: set swap\.directory"):
        disk(tmp_path / "swap")


@pytest.mark.parametrize("where", ["/proc/swap", "/dev/null/swap", "file"])
def test_an_unusable_directory_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        SwapError, match=f"cannot use swap directory .*{where}: .*; set swap.directory"
    ):
        disk(tmp_path / where)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir(mode=0o500)
    with pytest.raises(SwapError, match="Permission denied"):
        disk(tmp_path / "swap")


@pytest.mark.parametrize(("tier", "kind"), [("host", HostStore), ("disk", DiskStore)])
def test_the_configuration_opens_the_tier(tmp_path: Path, tier: str, kind: type) -> None:
    config = SwapConfig(directory=str(tmp_path / "named"))
    store = config.open_store(tier, MIB, CpuCopies(), tmp_path / "auto")
    assert isinstance(store, kind)
    assert (tmp_path / "named").exists() == (tier == "disk")
    assert not (tmp_path / "auto").exists()
    store.close()


def test_slabs_are_allocated_as_they_are_needed() -> None:
    """``parallax.swap`` may hold four times its limit in host memory, and pinned all of that at its first write."""
    allocated: list[int] = []

    class Counting(CpuCopies):
        def arena(self, count: int) -> PlainArena:
            if sum(allocated) >= 3 * MIB:
                raise SwapError("cannot pin")
            allocated.append(count)
            return PlainArena(count)

    store = HostStore(10 * MIB, Counting(), slab_bytes=MIB)
    assert allocated == []
    first, _ = store.write(noise(MIB // 2))
    assert allocated == [MIB]
    store.write(noise(2 * MIB))
    assert allocated == [MIB] * 3
    with pytest.raises(SwapError, match="cannot pin"):
        store.write(noise(MIB))
    assert store.slots.used_bytes == MIB // 2 + 2 * MIB
    store.free(first)
    store.write(noise(MIB // 2))
    assert store.waste_bytes == 0
    store.close()

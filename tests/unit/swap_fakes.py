"""What the tests of the swap share: a store that obeys the test, managers, tensors to save."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from parallax.device import CpuCopies
from parallax.errors import SwapError
from parallax.model.saved import Selector
from parallax.swap.activations import offloading
from parallax.swap.manager import SwapManager
from parallax.swap.slots import Slot, SlotMap
from parallax.swap.store import DiskStore, HostStore, Pending

MIB = 2**20
Make = Callable[..., SwapManager]


@contextlib.contextmanager
def making(kind: str, folder: Path) -> Iterator[Make]:
    """Makes managers over a store of ``kind``; afterwards each must be empty."""
    made: list[SwapManager] = []

    def build(limit: int = 64 * MIB, capacity: int = 64 * MIB) -> SwapManager:
        copies = CpuCopies()
        disk = kind == "disk"
        store = DiskStore(folder, capacity, copies, threads=2) if disk else HostStore(capacity, copies)
        made.append(SwapManager(store, limit_bytes=limit))
        return made[-1]

    try:
        yield build
        gc.collect()
        for manager in made:
            settle(manager)
            assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)
    finally:
        for manager in made:
            manager.close()


def settle(manager: SwapManager, seconds: float = 10.0) -> None:
    """Wait until everything has left the device."""
    deadline = time.monotonic() + seconds
    while manager.resident_bytes and time.monotonic() < deadline:
        time.sleep(0.001)


def everything(*held: Tensor) -> Selector:
    return Selector(held, minimum_bytes=1)


class Save(torch.autograd.Function):
    """Saves tensors; its backward looks at what came back."""

    seen: ClassVar[list[tuple[Tensor, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        Save.seen.append(ctx.saved_tensors)
        return (gradient, *[None] * (len(ctx.needs_input_grad) - 1))


def save(manager: SwapManager, *tensors: Tensor, micro: int = 0) -> Tensor:
    """A scalar whose backward unpacks ``tensors`` into ``Save.seen``."""
    with offloading(manager, everything(), micro):
        return Save.apply(torch.zeros((), requires_grad=True), *tensors)


def unpacked(root: Tensor, **options: Any) -> tuple[Tensor, ...]:
    root.backward(**options)
    return Save.seen.pop()


class ManualPending:
    def __init__(self, store: ManualStore, name: str, work: Callable[[], None]) -> None:
        self.store, self.name, self.work = store, name, work
        self.finished = self.cancelled = self.running = False
        self.error: SwapError | None = None

    def finish(self) -> None:
        if not self.finished and not self.cancelled:
            if self.error is None:
                self.work()
            self.work = lambda: None  # as a store must: it holds the tensor
            self.finished = True
            self.store.log.append(self.name)

    def done(self) -> bool:
        if self.finished and self.error is not None:
            raise SwapError(str(self.error))
        return self.finished

    def wait(self) -> None:
        assert not self.cancelled, "waits for what was cancelled"
        self.finish()
        self.done()

    def cancel(self) -> bool:
        if not (self.running or self.finished):
            self.cancelled, self.work = True, lambda: None
        return self.cancelled


class ManualStore:
    """A place may be given away only when nothing runs on it; every transfer is checked against that."""

    tier = "manual"

    def __init__(self, capacity: int = 2**40) -> None:
        self.slots = SlotMap(capacity, "the manual tier")
        self.places: dict[int, Tensor] = {}
        self.transfers: list[ManualPending] = []
        self.running: dict[int, list[ManualPending]] = {}
        self.log: list[str] = []
        self.bytes_out = self.bytes_in = 0

    def write(self, data: Tensor) -> tuple[Slot, Pending]:
        slot = self.slots.take(data.numel())

        def work() -> None:
            self.places[slot.offset] = data.clone()
            self.bytes_out += slot.size

        return slot, self._begin(slot, f"write {slot.size}", work)

    def read(self, slot: Slot, target: Tensor) -> Pending:
        def work() -> None:
            target.copy_(self.places[slot.offset])
            self.bytes_in += slot.size

        return self._begin(slot, f"read {slot.size}", work)

    def free(self, slot: Slot) -> None:
        assert not [t for t in self.running.pop(slot.offset, []) if not (t.finished or t.cancelled)]
        self.places.pop(slot.offset, None)
        self.slots.give(slot)

    def close(self) -> None:
        for transfer in self.transfers:
            if not transfer.cancel():
                transfer.finish()

    def finish(self, count: int) -> None:
        for transfer in [t for t in self.transfers if not (t.finished or t.cancelled)][:count]:
            transfer.finish()
        self.transfers = [t for t in self.transfers if not (t.finished or t.cancelled)]

    def _begin(self, slot: Slot, name: str, work: Callable[[], None]) -> ManualPending:
        assert not [t for t in self.running.get(slot.offset, []) if not (t.finished or t.cancelled)]
        self.transfers.append(ManualPending(self, name, work))
        self.running.setdefault(slot.offset, []).append(self.transfers[-1])
        return self.transfers[-1]

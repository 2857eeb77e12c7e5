"""Host memory for copies to and from a device, allocated once and no more than asked."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import SwapError
from parallax.machine.host import kept_apart, usable_cores

PINNING_REMEDY = (
    "lower cluster.host_memory, raise the limit of locked memory (ulimit -l), or set swap.tier=disk"
)
_HUGE = 2 * 2**20  # bytes of a huge page, where there are some
# Linux's number, for which Python has no name: a child that is forked gets empty pages of its own.
_MADV_WIPEONFORK = 18
_TOUCHING = (
    8  # threads that touch an arena's pages: the kernel clears each when it is touched first
)


class Arena(Protocol):
    """Host bytes for copies, allocated once. ``allocated_bytes`` tells what they cost."""

    data: Tensor
    allocated_bytes: int

    def close(self) -> None:
        """Give them back. The caller has waited for the copies."""


class PlainArena:
    """Ordinary memory."""

    def __init__(self, count: int) -> None:
        self.data, self.allocated_bytes = torch.empty(count, dtype=torch.uint8), count

    def close(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)


class ApartArena:
    """Pages of a host whose memory is the device, too: what measures the device leaves them out."""

    def __init__(self, count: int) -> None:
        self.allocated_bytes = max(1, -(-count // mmap.PAGESIZE)) * mmap.PAGESIZE
        pages = _pages(count, self.allocated_bytes)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        self.data = whole[:count]
        with kept_apart(self.allocated_bytes):
            _touch(whole, ())
        # An owner that failed has not closed it.
        self._left = weakref.finalize(self, _give_back, pages, self.allocated_bytes)

    def close(self) -> None:
        """Give them back, whoever still has a view of them."""
        self._left()
        self.data = torch.empty(0, dtype=torch.uint8)


def _give_back(pages: mmap.mmap, count: int) -> None:
    with kept_apart(-count):
        pages.madvise(mmap.MADV_DONTNEED)


class TorchArena:
    """Pinned by torch, which rounds up to a power of two: for devices that cannot register what others allocated."""

    def __init__(self, count: int, remedy: str = PINNING_REMEDY) -> None:
        self.allocated_bytes = 1 << max(0, count - 1).bit_length()
        try:
            self.data = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise SwapError(
                f"cannot pin {format_bytes(count)} of host memory: {str(error).splitlines()[0]}; {remedy}"
            ) from error

    def close(self) -> None:
        """Let go; torch waits for the copies."""
        self.data = torch.empty(0, dtype=torch.uint8)


class RegisteredArena:
    """Whole pages that ``register`` pins, given their address and bytes; it returns 0, or what the runtime says is
    wrong. They are the process's own, huge where the system has such, touched by several threads, on ``cpus`` where
    those near the device are known: a page lies in the memory of the processor that touches it first. What an owner
    that failed leaves behind is given to ``unregister`` when it is collected, after ``synchronize``, which waits for
    the device: such an owner has not waited for its copies. A child that is forked has none of them: the kernel would
    copy what is pinned for each, or, before 5.10, give the process other pages than those that the device writes.
    """

    def __init__(
        self,
        count: int,
        register: Callable[[int, int], int],
        unregister: Callable[[int], object],
        *,
        synchronize: Callable[[], object],
        cpus: Collection[int] = (),
        remedy: str = PINNING_REMEDY,
    ) -> None:
        self.allocated_bytes = max(1, -(-count // mmap.PAGESIZE)) * mmap.PAGESIZE
        pages = _pages(count, self.allocated_bytes, f"; {remedy}")
        with contextlib.suppress(OSError):  # a kernel before 4.14
            pages.madvise(_MADV_WIPEONFORK)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        self.data = whole[:count]
        _touch(whole, cpus)
        code = register(whole.data_ptr(), self.allocated_bytes)
        if code:
            raise SwapError(
                f"cannot pin {format_bytes(count)} of host memory: error {code} of the device's runtime; {remedy}"
            )
        # The map is held here, too: it must not be gone before it is unregistered.
        self._left = weakref.finalize(self, _unpin_later, unregister, synchronize, whole)

    def close(self) -> None:
        """Unpin; the pages go with the last view of them."""
        if (held := self._left.detach()) is not None:
            _, _, (unregister, _, whole), _ = held
            unregister(whole.data_ptr())
        self.data = torch.empty(0, dtype=torch.uint8)


def _unpin_later(
    unregister: Callable[[int], object], synchronize: Callable[[], object], whole: Tensor
) -> None:
    # A device that failed copies nothing any more, and a forked child has none.
    with contextlib.suppress(RuntimeError):
        synchronize()
    with contextlib.suppress(RuntimeError):
        unregister(whole.data_ptr())


def _pages(count: int, allocated: int, way_out: str = "") -> mmap.mmap:
    """The process's own, for ``count`` bytes, huge where the system has such."""
    try:
        pages = mmap.mmap(-1, allocated, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if allocated >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError) as error:
        raise SwapError(
            f"cannot allocate {format_bytes(count)} of host memory: {error}{way_out}"
        ) from error
    return pages


def _touch(whole: Tensor, cpus: Collection[int]) -> None:
    """Let the kernel allocate all pages now."""
    threads = max(1, min(_TOUCHING, int(usable_cores()), -(-whole.numel() // _HUGE)))
    if threads < 2 and not cpus:
        whole[:: mmap.PAGESIZE].zero_()
        return

    def touch(part: Tensor) -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # of this thread alone
        part[:: mmap.PAGESIZE].zero_()

    share = -(-whole.numel() // threads // _HUGE) * _HUGE
    with ThreadPoolExecutor(threads, "parallax-touch") as pool:
        deque(pool.map(touch, whole.split(share)), maxlen=0)  # raises what they raise

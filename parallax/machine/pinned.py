"""Host memory for copies to and from a device, allocated once with the exact size."""

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
from parallax.machine.host import outside_device_memory, usable_cores

PINNING_REMEDY = (
    "lower cluster.host_memory, raise the limit of locked memory (ulimit -l), or set swap.tier=disk"
)
_HUGE = 2 * 2**20  # bytes of a huge page
# Linux's number, without a name in Python: a forked child gets zero pages instead of copies.
_MADV_WIPEONFORK = 18
_TOUCHING = 8  # threads that touch an arena's pages, which the kernel clears at the first touch


class Arena(Protocol):
    """Host memory for copies, allocated once. ``data`` is the memory as a tensor of bytes, with the requested size.
    ``allocated_bytes`` is the number of bytes taken from the system."""

    data: Tensor
    allocated_bytes: int

    def close(self) -> None:
        """Free the memory. The caller must have waited for all copies."""


class PlainArena:
    """An arena of ``count`` bytes of pageable memory."""

    def __init__(self, count: int) -> None:
        self.data, self.allocated_bytes = torch.empty(count, dtype=torch.uint8), count

    def close(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)


class ApartArena:
    """An arena of ``count`` bytes on a machine whose RAM also serves as the device. Meters of device memory exclude the
    arena."""

    def __init__(self, count: int) -> None:
        self.allocated_bytes = max(1, -(-count // mmap.PAGESIZE)) * mmap.PAGESIZE
        pages = _pages(count, self.allocated_bytes)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        self.data = whole[:count]
        with outside_device_memory(self.allocated_bytes):
            _touch(whole, ())
        # frees it for an owner that failed before close()
        self._left = weakref.finalize(self, _give_back, pages, self.allocated_bytes)

    def close(self) -> None:
        """Free the pages even if views of them still exist."""
        self._left()
        self.data = torch.empty(0, dtype=torch.uint8)


def _give_back(pages: mmap.mmap, count: int) -> None:
    with outside_device_memory(-count):
        pages.madvise(mmap.MADV_DONTNEED)


class TorchArena:
    """An arena of ``count`` bytes that torch pins, which allocates a power of two. Error messages end with ``remedy``.

    This class is for devices that cannot pin memory allocated outside torch.
    """

    def __init__(self, count: int, remedy: str = PINNING_REMEDY) -> None:
        self.allocated_bytes = 1 << max(0, count - 1).bit_length()
        try:
            self.data = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise SwapError(
                f"cannot pin {format_bytes(count)} of host memory: {str(error).splitlines()[0]}; {remedy}"
            ) from error

    def close(self) -> None:
        """Release the memory to torch, which waits for the copies."""
        self.data = torch.empty(0, dtype=torch.uint8)


class RegisteredArena:
    """An arena of exact size: pages of this process, for ``count`` bytes, that ``register(address, bytes)`` pins.

    ``register`` returns 0 or an error code of the device's runtime. Error messages end with ``remedy``. Huge pages are
    used if possible. The kernel places a page in the memory of the processor that touches it first. So threads on
    ``cpus``, which are near the device, touch all pages first.

    Code that fails before it calls :meth:`close` has not waited for its copies either. So a finalizer calls
    ``synchronize`` and then ``unregister``. A forked child does not inherit the pages. Otherwise the kernel would copy
    pinned pages for each child. Before Linux 5.10, the kernel could even move this process to copies of the pages,
    while the device still writes to the original pages.
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
        # holds the map, too, which must be unregistered before it is freed
        self._left = weakref.finalize(self, _unpin_later, unregister, synchronize, whole)

    def close(self) -> None:
        """Unpin the pages. They are freed when no tensor uses them any more."""
        if (held := self._left.detach()) is not None:
            _, _, (unregister, _, whole), _ = held
            unregister(whole.data_ptr())
        self.data = torch.empty(0, dtype=torch.uint8)


def _unpin_later(
    unregister: Callable[[int], object], synchronize: Callable[[], object], whole: Tensor
) -> None:
    # A failed device copies nothing any more, and a forked child has no device.
    with contextlib.suppress(RuntimeError):
        synchronize()
    with contextlib.suppress(RuntimeError):
        unregister(whole.data_ptr())


def _pages(count: int, allocated: int, advice: str = "") -> mmap.mmap:
    """Map ``allocated`` bytes of private memory, whole pages for ``count`` bytes, with huge pages if possible. Raises
    :class:`SwapError`, with a message that ends with ``advice``, if memory is short."""
    try:
        pages = mmap.mmap(-1, allocated, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if allocated >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError) as error:
        raise SwapError(
            f"cannot allocate {format_bytes(count)} of host memory: {error}{advice}"
        ) from error
    return pages


def _touch(whole: Tensor, cpus: Collection[int]) -> None:
    """Touch all pages of ``whole``, so that the kernel allocates them now, near ``cpus``."""
    threads = max(1, min(_TOUCHING, int(usable_cores()), -(-whole.numel() // _HUGE)))
    if threads < 2 and not cpus:
        whole[:: mmap.PAGESIZE].zero_()
        return

    def touch(part: Tensor) -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # affects this thread only
        part[:: mmap.PAGESIZE].zero_()

    share = -(-whole.numel() // threads // _HUGE) * _HUGE
    with ThreadPoolExecutor(threads, "parallax-touch") as pool:
        deque(pool.map(touch, whole.split(share)), maxlen=0)  # raises what they raise

"""The device's bytes and seconds, as a way of training sees them: torch's counters and events on CUDA, and on a CPU
the tensors that are alive, counted, and the host's clock."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class CudaMeter:
    """torch's own counters and events; the cap is the allocator's."""

    def __init__(self, cap_bytes: int | None) -> None:
        if cap_bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), 0)

    def used_bytes(self) -> int:
        """In tensors, now."""
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """The most since :meth:`release`."""
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Free unused memory for other processes, and reset the counters."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """A point in time on the device: when the device reaches it, not when the host queues it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """From each mark to the next."""
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def elsewhere(self) -> AbstractContextManager[object]:
        """Return a context in which allocations count as host memory."""
        return contextlib.nullcontext()


class CountedMeter(TorchDispatchMode):
    """A simulated device in main memory: the live storages that this thread has made."""

    def __init__(self, cap_bytes: int | None) -> None:
        super().__init__()
        self._cap, self._used, self._peak, self._counts = cap_bytes, 0, 0, True
        self._alive: set[int] = set()  # addresses, also of storages that do not count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the storages of what an operator returns."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes() if self._counts else 0
        if key == 0 or key in self._alive:
            return
        if self._cap is not None and self._used + size > self._cap:
            raise torch.OutOfMemoryError(f"{size} bytes more than {self._used} of {self._cap}")
        self._alive.add(key)
        self._used += size
        self._peak = max(self._peak, self._used)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._used -= size

    def used_bytes(self) -> int:
        """In tensors, now."""
        return self._used

    def peak_bytes(self) -> int:
        """The most since :meth:`release`."""
        return self._peak

    def release(self) -> None:
        """Reset the counters."""
        gc.collect()
        self._peak = self._used

    def synchronize(self) -> None:
        """No-op: operators of the CPU are complete when they return."""

    def mark(self) -> float:
        """Return the time of the host's clock."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """From each mark to the next."""
        return [after - before for before, after in pairwise(marks)]

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Return a context in which tensors count as host memory."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before


Meter = CudaMeter | CountedMeter

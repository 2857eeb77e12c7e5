"""Streams, events and pinned memory of a device, and the null objects that stand for them on a CPU.

Callers never ask which device they are on: on a CPU every copy is finished when it returns, so the null event is
always done and waiting for it does nothing. All logic above this file is therefore tested without a GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether everything before it has finished."""

    def wait_host(self) -> None:
        """Block this thread until it has."""

    def wait_stream(self) -> None:
        """Make the current compute stream wait for it."""


class DoneEvent:
    """Everything has already happened."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait_host(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self) -> None:
        """Nothing to wait for."""


class CudaEvent:
    """A CUDA event recorded on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return self._event.query()

    def wait_host(self) -> None:
        """Block this thread."""
        self._event.synchronize()

    def wait_stream(self) -> None:
        """Order the current stream after it."""
        torch.cuda.current_stream().wait_event(self._event)


class CopyEngine(Protocol):
    """Copies between device and host memory beside the compute stream."""

    def empty_host(self, count: int) -> Tensor:
        """Host bytes that copies can use at full speed."""

    def copy(self, source: Tensor, target: Tensor) -> Event:
        """Copy after all work already given to the compute stream; the event is its end."""

    def synchronize(self) -> None:
        """Wait for the device."""


class CpuCopies:
    """Host to host: finished on return."""

    def empty_host(self, count: int) -> Tensor:
        """Plain memory."""
        return torch.empty(count, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor) -> Event:
        """An ordinary copy."""
        target.copy_(source)
        return DoneEvent()

    def synchronize(self) -> None:
        """Nothing runs behind this thread's back."""


class CudaCopies:
    """One side stream for each direction, so that offloads and fetches do not queue behind each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def empty_host(self, count: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor, target: Tensor) -> Event:
        """Asynchronous; the caller keeps both tensors until the event is done."""
        stream = self._down if source.is_cuda else self._up
        # The source's last kernel, or the last user of the block that the target was carved from, is on the
        # compute stream: without this wait the allocator's reuse is a race.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return CudaEvent(stream)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self._device)


def copies_for(device: torch.device) -> CopyEngine:
    """The copy engine of a device."""
    return CudaCopies(device) if device.type == "cuda" else CpuCopies()


def select_device(kind: str, local_rank: int) -> torch.device:
    """The device of a local rank; several ranks may share one GPU."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device

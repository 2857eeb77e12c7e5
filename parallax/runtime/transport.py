"""Channels between stages: FIFO per edge and direction, a header and raw tensors per message.

A message is a tuple of tensors. Its header says what follows; because shapes rarely change, the receiver posts the
payload's buffers together with the header's, guessing that the next message is like the last one but for its number
of rows, so that bytes flow while it computes. The sender makes the same guess; where it is wrong the header says so
and zeros fill the buffers that were posted in vain. gloo carries host tensors only: those of a CUDA device are staged
through pinned memory, which is also the way between devices that have no link, or share one GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.device import CopyEngine
from parallax.errors import TransportError

Spec = tuple[tuple[torch.dtype, tuple[int, ...]], ...]

_HEADER = 64  # numbers: flag, count, then (dtype, dimensions, sizes …) per tensor
_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8]
_DTYPES += [torch.uint8, torch.bool]


Post = Callable[[Sequence[Tensor]], None]


class Staging(Protocol):
    """The way between a device's tensors and tensors that gloo can carry."""

    def send(self, tensors: Sequence[Tensor], post: Post) -> None:
        """Call ``post`` with host copies, in order with all earlier sends, without blocking the device."""

    def buffer(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """An empty host tensor to receive into."""

    def up(self, tensor: Tensor) -> Tensor:
        """A received tensor on the device."""

    def drain(self) -> None:
        """Wait until everything has been handed to gloo; raise what a send raised."""


class DirectStaging:
    """Host tensors travel as they are."""

    def send(self, tensors: Sequence[Tensor], post: Post) -> None:
        """gloo sends asynchronously by itself."""
        post([tensor.contiguous() for tensor in tensors])

    def buffer(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Plain memory."""
        return torch.empty(shape, dtype=dtype)

    def up(self, tensor: Tensor) -> Tensor:
        """Already there."""
        return tensor

    def drain(self) -> None:
        """Nothing is queued."""


class PinnedStaging:
    """Through pinned memory; one thread waits for the copies down, so that the main thread keeps feeding the device."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parallax-send")
        self._queued: list[Future[None]] = []

    def send(self, tensors: Sequence[Tensor], post: Post) -> None:
        """Copy down on the side stream and post from the thread."""
        sources = [tensor.contiguous() for tensor in tensors]
        hosts = [self.buffer(tensor.dtype, tuple(tensor.shape)) for tensor in sources]
        events = [self._copies.copy(source, host) for source, host in zip(sources, hosts)]

        def run() -> None:
            for event in events:
                event.wait_host()
            sources.clear()
            post(hosts)

        self._queued.append(self._thread.submit(run))

    def buffer(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Pinned memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def up(self, tensor: Tensor) -> Tensor:
        """Copy up; the compute stream waits, this thread does not."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._copies.copy(tensor, target).wait_stream()
        return target

    def drain(self) -> None:
        """Wait for the thread."""
        for future in self._queued:
            future.result()
        self._queued.clear()


def staging_for(device: torch.device, copies: CopyEngine) -> Staging:
    """The staging of a device."""
    return PinnedStaging(device, copies) if device.type == "cuda" else DirectStaging()


def _specify(tensors: Sequence[Tensor]) -> Spec:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def _resized(spec: Spec, rows: int) -> Spec:
    """The guess for the next message: the last one's tensors with another number of rows."""
    return tuple((dtype, (rows, *shape[1:])) if shape else (dtype, shape) for dtype, shape in spec)


def _encode(spec: Spec, guessed: bool) -> Tensor:
    numbers = [int(guessed), len(spec)]
    for dtype, shape in spec:
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > _HEADER:
        raise TransportError(f"a message of {len(spec)} tensors does not fit a header: join some of them")
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def _decode(header: Tensor) -> tuple[Spec, bool]:
    numbers = header.tolist()
    guessed, count, at = bool(numbers[0]), numbers[1], 2
    spec = []
    for _ in range(count):
        dtype, dims = _DTYPES[numbers[at]], numbers[at + 1]
        spec.append((dtype, tuple(numbers[at + 2 : at + 2 + dims])))
        at += 2 + dims
    return tuple(spec), guessed


class Sender:
    """The sending end of one channel."""

    def __init__(self, peer: int, tag: int, staging: Staging) -> None:
        self._peer, self._tag, self._staging = peer, tag, staging
        self._last: Spec | None = None
        self._works: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send one message of tensors that share their rows; returns at once."""
        spec = _specify(tensors)
        guess = _resized(self._last, spec[0][1][0]) if self._last else None
        wasted = guess if guess is not None and guess != spec else None
        header = _encode(spec, guess == spec)
        self._last = spec
        self._staging.send([tensor.detach() for tensor in tensors], lambda hosts: self._post(header, wasted, hosts))

    def flush(self) -> None:
        """Wait until the peer has everything; the caller has drained the staging."""
        while self._works:
            self._works.popleft()[0].wait()

    def _post(self, header: Tensor, wasted: Spec | None, tensors: Sequence[Tensor]) -> None:
        while self._works and self._works[0][0].is_completed():
            self._works.popleft()
        self._begin(header, self._tag)
        for dtype, shape in wasted or ():
            self._begin(torch.zeros(shape, dtype=dtype), self._tag + 1)
        for tensor in tensors:
            self._begin(tensor, self._tag + 1)

    def _begin(self, tensor: Tensor, tag: int) -> None:
        work = dist.isend(tensor, self._peer, tag=tag)
        assert work is not None
        self._works.append((work, tensor))


class Receiver:
    """The receiving end of one channel."""

    def __init__(self, peer: int, tag: int, staging: Staging) -> None:
        self._peer, self._tag, self._staging = peer, tag, staging
        self._last: Spec | None = None
        self._header: tuple[dist.Work, Tensor] | None = None
        self._payload: list[tuple[dist.Work, Tensor]] = []

    def post(self, rows: int) -> None:
        """Post the buffers of the next message, expected to have ``rows`` rows."""
        if self._header is None:
            self._header = self._begin(torch.empty(_HEADER, dtype=torch.int64), self._tag)
            self._payload = self._begin_all(_resized(self._last, rows) if self._last else ())

    def receive(self, rows: int) -> tuple[Tensor, ...]:
        """Wait for the next message."""
        self.post(rows)
        assert self._header is not None
        work, header = self._header
        work.wait()
        spec, guessed = _decode(header)
        for pending, _ in self._payload:
            pending.wait()
        if not guessed:
            self._payload = self._begin_all(spec)
            for pending, _ in self._payload:
                pending.wait()
        tensors = [tensor for _, tensor in self._payload]
        self._header, self._payload, self._last = None, [], spec
        if spec[0][1][0] != rows:
            raise TransportError(
                f"rank {self._peer} sent {spec[0][1][0]} rows where {rows} were due: every tensor between blocks "
                "must have the micro-batch's rows in its first dimension"
            )
        return tuple(self._staging.up(tensor) for tensor in tensors)

    def _begin_all(self, spec: Spec) -> list[tuple[dist.Work, Tensor]]:
        return [self._begin(self._staging.buffer(dtype, shape), self._tag + 1) for dtype, shape in spec]

    def _begin(self, tensor: Tensor, tag: int) -> tuple[dist.Work, Tensor]:
        work = dist.irecv(tensor, self._peer, tag=tag)
        assert work is not None
        return work, tensor

"""Channels between stages: FIFO per edge and direction, one buffer per message.

A message is a tuple of tensors, packed behind a header that says what they are. Because shapes rarely change, the
receiver posts the buffer of the next message before it is due, guessing that it is like the last one but for its
number of rows, so that bytes flow while it computes. The sender makes the same guess: a message that fits travels
in that buffer; of a longer one it carries the header alone, and the whole message follows. One buffer, because gloo
charges for messages, not for bytes: header and payload apart made a round trip three times as long.

Where every rank has its own GPU, NCCL carries device buffers. gloo carries host buffers only: tensors of a CUDA device
are then staged through pinned memory, which is also the way between devices that have no link, or share one GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.device import CopyEngine, Event
from parallax.errors import TransportError
from parallax.mesh import Mesh

Spec = tuple[tuple[torch.dtype, tuple[int, ...]], ...]

_HEADER = 64  # numbers of 8 bytes: count, then (dtype, dimensions, sizes …) per tensor
_ALIGNMENT = 64  # bytes; what torch gives its own tensors
_QUEUED = 4  # messages that may wait for their copies down
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
]
_DTYPES += [torch.uint8, torch.bool]


class Staging(Protocol):
    """The way between a device's tensors and buffers that a process group can carry."""

    def buffer(self, count: int) -> Tensor:
        """An empty buffer of ``count`` bytes."""

    def send(self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]) -> None:
        """Copy ``tensors`` into ``targets``, parts of a buffer, then call ``post``: in order with all earlier sends,
        and without blocking the device."""

    def up(self, buffer: Tensor) -> Tensor:
        """A received buffer on the device."""

    def drain(self) -> None:
        """Wait until everything has been handed to the group; raise what a send raised."""


class DirectStaging:
    """Buffers lie where the tensors are and travel as they are: host memory by gloo, which sends by itself; GPU memory
    by NCCL, which orders itself after the compute stream and makes it wait for arrivals."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, count: int) -> Tensor:
        """Memory of the device."""
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    def send(self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]) -> None:
        """Pack and post."""
        for tensor, target in zip(tensors, targets):
            target.copy_(tensor)
        post()

    def up(self, buffer: Tensor) -> Tensor:
        """Already there."""
        return buffer

    def drain(self) -> None:
        """Nothing is queued on the host."""


class PinnedStaging:
    """Through pinned memory; one thread waits for the copies down, so that the main thread keeps feeding the device."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parallax-send")
        self._queued: deque[Future[None]] = deque()

    def buffer(self, count: int) -> Tensor:
        """Pinned memory."""
        return self._copies.empty_host(count)

    def send(self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]) -> None:
        """Copy down on the side stream and post from the thread."""
        sources = list(tensors)
        events: list[Event] = [self._copies.copy(source, target) for source, target in zip(sources, targets)]

        def run() -> None:
            for event in events:
                event.wait_host()
            sources.clear()
            post()

        while len(self._queued) >= _QUEUED:
            self._queued.popleft().result()
        self._queued.append(self._thread.submit(run))

    def up(self, buffer: Tensor) -> Tensor:
        """Copy up; the compute stream waits, this thread does not."""
        target = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
        self._copies.copy(buffer, target).wait_stream()
        return target

    def drain(self) -> None:
        """Wait for the thread."""
        while self._queued:
            self._queued.popleft().result()


def staging_for(mesh: Mesh, copies: CopyEngine) -> Staging:
    """The staging of a rank's device."""
    if mesh.device.type == "cuda" and not mesh.direct:
        return PinnedStaging(mesh.device, copies)
    return DirectStaging(mesh.device)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How tensors lie in a message: the header, the first byte of each tensor, and the bytes of it all."""

    spec: Spec
    header: Tensor
    starts: tuple[int, ...]
    size: int

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in ``buffer``. Each counts its own in-place changes, as if it had its own memory."""
        storage = buffer.untyped_storage()
        return [
            torch.empty(0, dtype=dtype, device=buffer.device).set_(storage, start // dtype.itemsize, shape, ())
            for (dtype, shape), start in zip(self.spec, self.starts)
        ]


@lru_cache(maxsize=256)
def _lay_out(spec: Spec) -> _Layout:
    numbers = [len(spec)]
    for dtype, shape in spec:
        if dtype not in _DTYPES:
            raise TransportError(f"a block returned {dtype}; stages exchange {', '.join(map(str, _DTYPES))}")
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > _HEADER:
        raise TransportError(f"a message of {len(spec)} tensors does not fit a header: join some of them")
    header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)
    sizes = [-(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for dtype, shape in spec]
    *starts, end = accumulate(sizes, initial=header.nbytes)
    return _Layout(spec, header.view(torch.uint8), tuple(starts), end)


def _read_header(buffer: Tensor) -> _Layout:
    numbers = buffer[: _HEADER * 8].view(torch.int64).tolist()
    spec, at = [], 1
    for _ in range(numbers[0]):
        dtype, dims = _DTYPES[numbers[at]], numbers[at + 1]
        spec.append((dtype, tuple(numbers[at + 2 : at + 2 + dims])))
        at += 2 + dims
    return _lay_out(tuple(spec))


def _guessed_size(last: Spec, rows: int) -> int:
    """Bytes of the next message if it is like the last one with another number of rows; at least a header."""
    return _lay_out(tuple((dtype, (rows, *shape[1:]) if shape else shape) for dtype, shape in last)).size


@dataclass(frozen=True, slots=True)
class Address:
    """Where a channel leads: its group, the place in it of the rank at the other end, and its tag."""

    group: dist.ProcessGroup | None
    peer: int
    tag: int

    def send(self, buffer: Tensor) -> dist.Work:
        """Begin to send; ``buffer`` must live and stay as it is until that has ended."""
        assert self.group is not None
        return self.group.send([buffer], self.peer, self.tag)

    def receive(self, buffer: Tensor) -> dist.Work:
        """Begin to receive."""
        assert self.group is not None
        return self.group.recv([buffer], self.peer, self.tag)


class Sender:
    """The sending end of one channel; at most ``ahead`` messages wait for the peer to take them."""

    def __init__(self, address: Address, staging: Staging, ahead: int) -> None:
        self._address, self._staging, self._ahead = address, staging, ahead
        self._last: Spec = ()
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Send one message, due to have ``rows`` rows; blocks only while the peer is ``ahead`` messages behind."""
        layout = _lay_out(tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors))
        guess = _guessed_size(self._last, rows)
        self._last = layout.spec
        sizes = [guess] if layout.size <= guess else [guess, layout.size]
        buffers = [self._staging.buffer(size) for size in sizes]
        for buffer in buffers:
            buffer[: layout.header.nbytes].copy_(layout.header)
        self._staging.send(tensors, layout.views(buffers[-1]), lambda: self._post(buffers))

    def flush(self) -> None:
        """Wait until the peer has everything; the caller has drained the staging."""
        self._wait(0)

    def _post(self, buffers: list[Tensor]) -> None:
        self._wait(self._ahead - 1)
        self._sent.append([(self._address.send(buffer), buffer) for buffer in buffers])

    def _wait(self, left: int) -> None:
        """Wait until no more than ``left`` messages are under way: gloo does not tell without waiting."""
        while len(self._sent) > left:
            for work, _ in self._sent.popleft():
                work.wait()


class Receiver:
    """The receiving end of one channel."""

    def __init__(self, address: Address, staging: Staging) -> None:
        self._address, self._staging = address, staging
        self._last: Spec = ()
        self._posted: tuple[dist.Work, Tensor] | None = None

    def post(self, rows: int) -> None:
        """Post the buffer of the next message, expected to have ``rows`` rows."""
        if self._posted is None:
            self._posted = self._begin(_guessed_size(self._last, rows))

    def receive(self, rows: int) -> tuple[Tensor, ...]:
        """Wait for the next message."""
        self.post(rows)
        assert self._posted is not None
        (work, buffer), self._posted = self._posted, None
        work.wait()
        layout = _read_header(buffer)
        if layout.size > buffer.numel():
            work, buffer = self._begin(layout.size)
            work.wait()
        self._last = layout.spec
        found = layout.spec[0][1][:1]
        if found != (rows,):
            raise TransportError(
                f"rank {self._address.peer} sent {found[0] if found else 'no'} rows where {rows} were due: every "
                "tensor between blocks must have the micro-batch's rows in its first dimension"
            )
        return tuple(layout.views(self._staging.up(buffer)))

    def _begin(self, size: int) -> tuple[dist.Work, Tensor]:
        buffer = self._staging.buffer(size)
        return self._address.receive(buffer), buffer

"""Transfers of records between device and store, their checksums, and the stream whose tensors are offloaded."""

from __future__ import annotations

import contextlib
from collections import Counter

import torch
from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import SwapError
from parallax.swap.activations.accounting import MemoryAccounting
from parallax.swap.activations.records import Record, State, bytes_of, new_bytes
from parallax.swap.stores.store import Store
from parallax.swap.verify import checksum, sum_bytes

_UNWRITTEN = 0xA5  # a byte that no tensor of a training run consists of


class Transfers:
    """Starts, cancels and counts the transfers of a manager's records (saved storages).

    The manager holds its lock during all calls.
    """

    def __init__(self, store: Store, accounting: MemoryAccounting) -> None:
        self._store, self._accounting = store, accounting

    def write(self, record: Record) -> None:
        assert record.storage is not None
        flat = bytes_of(record.storage, record.device)
        record.slot, record.transfer = self._store.write(flat)
        record.state, record.wanted = State.QUEUED, False

    def cancel_write(self, record: Record) -> bool:
        """Cancel a record's write and free its slot in the store; return False if the write has already begun."""
        assert record.slot is not None
        assert record.transfer is not None
        if not record.transfer.cancel():
            return False
        self.free_slot(record)
        record.transfer = None
        self._accounting.count_cancelled(record.size)
        return True

    def read(self, record: Record) -> None:
        """Begin to read a record's bytes into new device memory."""
        assert record.slot is not None
        flat = new_bytes(record.size, record.device)
        if record.sum is not None:
            # The new memory may still contain the right bytes from before, which would hide a missing wait.
            flat.fill_(_UNWRITTEN)
        record.transfer = self._store.read(record.slot, flat)
        record.storage, record.state, record.read_back = flat.untyped_storage(), State.LOADED, True
        self._accounting.add_resident(record.size)

    def wait_for_read(self, record: Record) -> None:
        if record.transfer is not None:
            self._accounting.wait_for(record.transfer, record.batch.micro)
            self.count(record)
            record.transfer = None

    def wait_ignoring_errors(self, record: Record, micro: int) -> None:
        """Wait for the transfer of a record that no autograd graph needs any more, and ignore an error of the transfer.

        The waiting time counts for micro-batch ``micro``.
        """
        if record.transfer is not None:
            with contextlib.suppress(SwapError):
                self._accounting.wait_for(record.transfer, micro)
                self.count(record)
            record.transfer = None

    def is_finished(self, record: Record) -> bool:
        """Whether no transfer uses the bytes of a record that no autograd graph needs."""
        if record.transfer is None:
            return True
        if record.transfer.cancel():
            if record.state is State.QUEUED:
                self._accounting.count_cancelled(record.size)
            return True
        try:
            if not record.transfer.done():
                return False
        except SwapError:
            return True  # no graph needs the bytes; the next write reports the error
        self.count(record)
        return True

    def count(self, record: Record) -> None:
        """Add the transfer of ``record``, which has ended or for which the device's stream waits, to the statistics."""
        assert record.transfer is not None
        out = record.state is State.QUEUED
        self._accounting.count_transfer(record.transfer, record.size, record.batch.micro, out=out)

    def free_slot(self, record: Record) -> None:
        """Free the record's slot in the store, if it has one."""
        if record.slot is not None:
            self._store.free(record.slot)
            record.slot = None


def store_sum(record: Record) -> None:
    """Compute the checksum of a new record (``swap.verify``) and keep it in ``record.sum``, without waiting for the
    device."""
    assert record.storage is not None
    record.sum = sum_bytes(bytes_of(record.storage, record.device))


def check_sum(record: Record) -> None:
    """Raise :class:`SwapError` if the checksum of the bytes read back differs from that of the bytes saved."""
    if record.sum is None or not record.read_back:
        return
    assert record.storage is not None
    assert record.layout is not None
    expected, found = int(record.sum), checksum(bytes_of(record.storage, record.device))
    if found != expected:
        raise SwapError(
            f"swap.verify: {format_bytes(record.size)} that micro-batch {record.batch.micro} saved with a tensor "
            f"of shape {list(record.layout[1])} came back changed (sum {found:x}, saved {expected:x}): test this "
            "machine's memory and disk; if they are sound, a wait is missing in Parallax: train without "
            "swap (swap=off) and report it"
        )


class SwapStream:
    """The stream whose activations are offloaded: the stream that saved the most bytes in the previous step.

    Copies to the store are ordered after this stream, and prefetched tensors belong to it. Tensors that another stream
    saves stay on the device, where autograd orders their uses.

    The choice changes only while no autograd graph is alive. If the chosen stream has saved nothing since it was
    chosen, the current stream replaces it as soon as the current stream has saved more bytes than the chosen one had
    saved before the choice.
    """

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None
        self._most = 0  # bytes that this stream had saved when it was chosen
        self._saved_bytes: Counter[torch.Stream] = Counter()  # bytes saved since then

    def is_other(self, tensor: Tensor, *, graphs_ended: bool) -> bool:
        """Return whether ``tensor``, which autograd is saving, must stay on the device because the current stream is
        not the one whose activations are offloaded. The bytes of ``tensor`` are counted for the next choice of this
        stream.

        ``tensor`` is on an accelerator. ``graphs_ended`` says whether no autograd graph is alive.
        """
        now = torch.accelerator.current_stream(tensor.device.index)
        if graphs_ended:
            self._choose(now)
        self._saved_bytes[now] += tensor.nbytes
        return now != self._stream

    def _choose(self, now: torch.Stream) -> None:
        if self._stream is None:
            self._stream = now
        elif self._saved_bytes[self._stream]:
            ((self._stream, self._most),) = self._saved_bytes.most_common(1)
            self._saved_bytes.clear()
        elif self._saved_bytes[now] > self._most:
            self._stream = now

"""Records of the swap manager, one per saved storage; the entries that keep records alive; and their micro-batches."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Final

import torch
from torch import Tensor

from parallax.errors import SwapError
from parallax.swap.stores.slots import StoreSlot
from parallax.swap.stores.store import Pending


class State:
    """The location of a record's bytes.

    The states are strings instead of enum members, because reading an enum member costs as much as a function call.
    """

    KEPT: Final = "on the device, to be written when memory is short"
    QUEUED: Final = "on the device, to be written"
    STORED: Final = "in the store"
    LOADED: Final = "on the device, or being read"


Layout = tuple[int | torch.SymInt, torch.Size, tuple[int, ...]]
"""Offset, size and strides of a tensor in its storage."""


@cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of this device and dtype, to replace the ``.data`` of a tensor.

    torch refuses to replace it by an empty tensor of another device or dtype.
    """
    return torch.empty(0, device=device, dtype=dtype)


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Return a uint8 tensor over all bytes of ``storage``, which is on ``device``. Nothing is copied."""
    return _nothing(device, torch.uint8).new_empty(0).set_(storage)


def new_bytes(size: int, device: torch.device) -> Tensor:
    """Return a new uint8 tensor of ``size`` bytes on ``device``.

    ``new_empty`` is a third faster than ``torch.empty``.
    """
    return _nothing(device, torch.uint8).new_empty(size)


def layout_of(tensor: Tensor) -> Layout:
    """Return a tensor's offset in its storage, its size and its strides."""
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def empty(alias: Tensor) -> None:
    """Release the bytes of ``alias``, a detached copy of a saved tensor, but keep the version counter that both
    share."""
    alias.data = _nothing(alias.device, alias.dtype)


class Batch:
    """The records (saved storages) of one micro-batch, from its first save to its backward, and the progress of their
    prefetch.

    A record references its batch. To avoid a cycle, the batch has only weak references to the records' entries.
    """

    def __init__(self, micro: int) -> None:
        self.micro = micro
        # Records saved so far; records passed so far in the order of use.
        self.saved = self.passed = 0
        self.claims: dict[int, Claim] = {}  # ordinal → claim, of records that are alive
        self.waiting: deque[Record] = deque()  # records in the store, in the order of use
        self.uses: dict[
            int, tuple[int, int]
        ] = {}  # ordinal → size, and records saved before the first use
        self.prefetching = False

    def append(self, record: Record) -> None:
        self.claims[record.ordinal] = record.claim
        self.saved += 1

    def need_index(self, record: Record) -> int:
        """Return a record's index in the order of use. The record saved last is used first."""
        return self.saved - 1 - record.ordinal

    def records_last_first(self) -> Iterator[Record]:
        """Yield the living records in the order of use: the record saved last comes first."""
        for claim in [*reversed(self.claims.values())]:
            entry = claim()
            if entry is not None:
                yield entry.record


class Record:
    """One saved storage, on the device or offloaded.

    ``alias``      the saved tensor, detached. It shares the saved tensor's version counter, and its bytes until they
                   are offloaded.
    ``origin``     weak reference to the saved storage. While that storage lives, the record uses it. Other code may
                   have written values to it without a new version (``.data``, numpy), and autograd without hooks would
                   use these values.
    ``layout``     offset, size and strides, set when the bytes are offloaded
    ``queue``      number of the record queue that contains the record
    ``clock``      serial number of the record, counted from 1 in its manager
    ``operation``  the operator that saved the record last
    ``wanted``     the record is needed again while its write runs
    ``evicting``   the record's bytes are included in :attr:`RecordQueues.evicting_bytes`
    ``read_back``  the record was offloaded, and read again
    """

    __slots__ = (
        "address",
        "alias",
        "batch",
        "claim",
        "clock",
        "device",
        "differentiable",
        "evicting",
        "layout",
        "operation",
        "ordinal",
        "origin",
        "queue",
        "read_back",
        "size",
        "slot",
        "state",
        "storage",
        "sum",
        "transfer",
        "uncounted_reason",
        "used",
        "version",
        "wanted",
    )

    def __init__(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        batch: Batch,
        clock: int,
        operation: int | None = None,
    ) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.origin = weakref.ref(storage)
        self.size, self.address = storage.nbytes(), storage.data_ptr()
        self.device, self.version = tensor.device, tensor._version
        self.alias: Tensor | None = tensor.detach()
        self.batch, self.ordinal, self.clock = batch, batch.saved, clock
        self.operation = operation
        self.state: str = State.KEPT
        self.transfer: Pending | None = None
        self.slot: StoreSlot | None = None
        self.queue: int | None = None
        self.wanted = self.evicting = self.read_back = False
        self.used = 0  # sequence number of its last use; 0: none
        self.differentiable = tensor.requires_grad
        self.uncounted_reason = (
            "kept"  # reason to count once it is evicted, used or freed; empty: counted
        )
        self.sum: Tensor | None = None
        self.layout: Layout | None = None
        self.claim: Claim

    def offload(self) -> None:
        """Release the device copy. The bytes are in the store."""
        self.storage = self.transfer = None
        self.state = State.STORED
        if self.alias is not None:
            # First, because another thread may find the alias empty.
            self.layout = self.layout or layout_of(self.alias)
            empty(self.alias)

    def free(self) -> None:
        """Release the bytes of a record that no autograd graph needs and no transfer uses."""
        self.storage = self.transfer = self.alias = None
        self.state = State.STORED


class Entry:
    """A reference to a record, returned by ``SwapManager.save``. While the entry lives, the record's bytes are
    recoverable.

    When an entry dies, its weak reference (a :class:`Claim`) is appended to ``unclaimed``, possibly during a call of
    the manager. ``__del__`` is not used, because a KeyboardInterrupt that arrives in a ``__del__`` is lost.
    """

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: Record, unclaimed: deque[Claim]) -> None:
        self.record = record
        record.claim = claim = Claim(self, unclaimed.append)
        claim.clock = record.clock


class Claim(weakref.ref[Entry]):
    """A weak reference to an entry, with the serial number of the entry's record (``clock``).

    The number identifies the record. A reference to the record would create a cycle, because the record references its
    claim.
    """

    __slots__ = ("clock",)
    clock: int


def tier_closed() -> SwapError:
    """Return the error for a record that is requested after the store was closed."""
    return SwapError(
        "the swap tier is closed: what was offloaded is gone; run backward before closing it"
    )

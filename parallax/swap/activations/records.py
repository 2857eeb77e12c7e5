"""The swap manager's books: one record per storage, the claims that keep it, and the micro-batch that saved it."""

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
    """Where the bytes of a record are. No enum, of which each look at a member takes as long as a call."""

    KEPT: Final = "on the device, to be written when room is needed"
    QUEUED: Final = "on the device, to be written"
    STORED: Final = "in the store"
    LOADED: Final = "on the device, or on the way to it"


Layout = tuple[int | torch.SymInt, torch.Size, tuple[int, ...]]
"""Offset, size and strides of a tensor in its storage."""


@cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor without bytes: torch lets ``.data`` change within a kind of device only."""
    return torch.empty(0, device=device, dtype=dtype)


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """All of a storage."""
    return _nothing(device, torch.uint8).new_empty(0).set_(storage)


def new_bytes(size: int, device: torch.device) -> Tensor:
    """Memory of that size on ``device``: made of a tensor, which takes two thirds of what torch.empty takes."""
    return _nothing(device, torch.uint8).new_empty(size)


def layout_of(tensor: Tensor) -> Layout:
    """Where it is in its storage."""
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def empty(alias: Tensor) -> None:
    """Take the bytes from ``alias``, and leave it no more than the version counter that it shares."""
    alias.data = _nothing(alias.device, alias.dtype)


class Batch:
    """What one micro-batch saved between two of its backwards, in order, and how far it is on its way back. Holds
    its records by their claims, since a record holds its batch."""

    def __init__(self, micro: int) -> None:
        self.micro = micro
        # Records so far; places in the order of need that are behind us.
        self.saved = self.passed = 0
        self.claims: dict[int, Claim] = {}  # ordinal → claim, of records that are alive
        self.waiting: deque[Record] = deque()  # in the store, in the order of need
        self.uses: dict[
            int, tuple[int, int]
        ] = {}  # ordinal → size, and records saved before the first use
        self.begun = False

    def enter(self, record: Record) -> None:
        """Take in what was saved now."""
        self.claims[record.ordinal] = record.claim
        self.saved += 1

    def place(self, record: Record) -> int:
        """Its place in the order of need: last saved, first needed."""
        return self.saved - 1 - record.ordinal

    def last_first(self) -> Iterator[Record]:
        """The records that are alive, in the order of need."""
        for claim in [*reversed(self.claims.values())]:
            entry = claim()
            if entry is not None:
                yield entry.record


class Record:
    """What the manager knows of one storage. ``origin`` finds the storage that was saved for as long as anybody, the
    record or the caller, holds it: what is written there behind autograd's back (``.data``, numpy) is what autograd
    would find there. ``alias`` is the tensor that was saved, without its history: it shares the version counter, and
    the bytes for as long as they never left. ``layout`` is its offset, size and strides, from when they leave.
    ``book``: the number of that of the manager's books in which it stands. ``operation``: which operator saved it
    last."""

    __slots__ = (
        "address",
        "alias",
        "batch",
        "book",
        "claim",
        "clock",
        "device",
        "differentiable",
        "layout",
        "leaving",
        "operation",
        "ordinal",
        "origin",
        "returned",
        "size",
        "slot",
        "state",
        "storage",
        "sum",
        "transfer",
        "undecided",
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
        self.book: int | None = None
        self.wanted = self.leaving = self.returned = False
        self.used = 0  # which of all uses was its last; 0: none
        self.differentiable = tensor.requires_grad
        self.undecided = "kept"  # why it stays, until it leaves, is used or dies
        self.sum: Tensor | None = None
        self.layout: Layout | None = None
        self.claim: Claim

    def leave(self) -> None:
        """Let go of the device's copy."""
        self.storage = self.transfer = None
        self.state = State.STORED
        if self.alias is not None:
            # First, for who finds it empty on another thread.
            self.layout = self.layout or layout_of(self.alias)
            empty(self.alias)

    def end(self) -> None:
        """Nobody claims it any more, and no transfer touches its bytes."""
        self.storage = self.transfer = self.alias = None
        self.state = State.STORED


class Entry:
    """A claim on a record. Made by ``SwapManager.add``; whoever holds it keeps its bytes recoverable. When it ends,
    ``unclaimed`` gets its claim, wherever that is, perhaps inside the manager. No Python runs there: an interrupt from
    the keyboard that arrives in a ``__del__`` is lost."""

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: Record, unclaimed: deque[Claim]) -> None:
        self.record = record
        record.claim = claim = Claim(self, unclaimed.append)
        claim.clock = record.clock


class Claim(weakref.ref[Entry]):
    """Finds an entry for as long as it lives, and knows its record by the clock, since the record holds it."""

    __slots__ = ("clock",)
    clock: int


def tier_closed() -> SwapError:
    """What is to be raised where a record is asked for too late."""
    return SwapError(
        "the swap tier is closed: what was offloaded is gone; run backward before closing it"
    )

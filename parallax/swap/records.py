"""The swap manager's books: one record per storage, and the claims that keep it."""

from __future__ import annotations

import weakref
from collections import deque
from enum import Enum

import torch
from torch import Tensor

from parallax.swap.slots import Slot
from parallax.swap.store import Pending


class State(Enum):
    """Where the bytes of a record are."""

    QUEUED = "on the device, to be written"
    STORED = "in the store"
    LOADED = "on the device, or on the way to it"


class Record:
    """What the manager knows of one storage. ``alias`` shares the version counter of the tensor that was
    saved, for as long as that tensor's own storage is the one held."""

    def __init__(self, tensor: Tensor, micro: int) -> None:
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.alias: Tensor | None = tensor.detach()
        self.size, self.address = self.storage.nbytes(), self.storage.data_ptr()
        self.device, self.version, self.micro = tensor.device, tensor._version, micro
        self.state = State.QUEUED
        self.transfer: Pending | None = None
        self.slot: Slot | None = None
        self.wanted = self.used = False
        self.claim: weakref.ref[Entry]

    def leave(self) -> None:
        """Let go of the device's copy; the alias stays only to tell of a change that came too early."""
        self.storage = self.transfer = None
        self.state = State.STORED
        if self.alias is not None and self.alias._version == self.version:
            self.alias = None


class Entry:
    """A claim on a record. Made by ``SwapManager.add``; whoever holds it keeps its bytes recoverable."""

    __slots__ = ("__weakref__", "_unclaimed", "record")

    def __init__(self, record: Record, unclaimed: deque[Record]) -> None:
        self.record, self._unclaimed = record, unclaimed
        record.claim = weakref.ref(self)

    def __del__(self) -> None:
        # Runs wherever the last reference ends, perhaps inside the manager: only leave word there.
        self._unclaimed.append(self.record)
